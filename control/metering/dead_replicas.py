"""Booking what dead replicas produced and could not deliver, from the logs they left."""

from pathlib import Path

from sqlalchemy import Engine

from control.metering.balance import waste_of_the_dead
from control.metering.ledger import compare
from control.metering.settlement import book_waste
from control.metering.step_log import dead_replicas, mark_booked, read_step_log


def book_the_dead(database: Engine, step_logs: Path) -> int:
    """Book the waste of each replica that is gone. Returns how many tokens.

    One whose requests have not all ended, here or elsewhere, is looked at again later. The other
    replicas' logs are read only if there is a dead one, for where they went on.
    """
    dead = dead_replicas(step_logs)
    if not dead:
        return 0
    of_the_dead = {
        replica: {attempt.request_id for attempt in read_step_log(replica)} for replica in dead
    }
    request_ids = set().union(*of_the_dead.values())
    names = {replica.name for replica in dead}
    with database.begin() as connection:
        found = compare(connection, step_logs, request_ids)
        lost = [w for w in waste_of_the_dead(found) if w.replica_id in names]
        if lost:
            book_waste(connection, lost)
    # Only now is it booked: had this been said before, a commit that failed would lose it.
    for replica, its_requests in of_the_dead.items():
        if its_requests.isdisjoint(found.still_open):
            mark_booked(replica)
    return sum(w.num_tokens for w in lost)
