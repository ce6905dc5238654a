"""The first words between the driver and a follower."""

import msgspec

# What a follower says: that it is about to meet the others, and that it can compute. Anything
# else that it says is why it ends.
HERE, READY = b"here", b"ready"


class Join(msgspec.Struct, frozen=True):
    """Which share of which model to compute, with how many threads, and where ranks meet."""

    rank: int
    size: int
    meeting_place: str
    folder: str
    dtype: str
    num_blocks: int
    block_size: int
    num_host_blocks: int
    num_threads: int
