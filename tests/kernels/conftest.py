"""Triton's kernels run in its interpreter here, which must be asked for before Triton is imported.

That is a decision for a whole process, so these tests run in one of their own, started by
`test_triton.py`; and `TRITON_INTERPRET=1 pytest tests/kernels` runs them where one can look.
"""

import os

INTERPRETED = ["test_triton_*.py", "test_quantised_linear.py", "test_copy_blocks.py"]

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else INTERPRETED
