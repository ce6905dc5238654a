"""The last step before a child becomes what it is: `launch.py PARENT SIGNAL USER COMMAND...`.

It gives up root if asked to (USER is `uid:gid`, or `-` to stay), asks the kernel to send
SIGNAL when the parent dies, and becomes COMMAND under the same process id. It runs as a
script, without site-packages, because the kernel forgets the wish when the user changes
(so it must come second) and because code between fork and exec may not take locks.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_COULD_NOT_START = 127


def main(arguments: list[str]) -> None:
    """Become the command; returns only by exiting with 127 and a line on standard error."""
    parent, death_signal, user, *command = arguments
    for stopping in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        # A shell that starts us in the background leaves some of these ignored, for ever.
        signal.signal(stopping, signal.SIG_DFL)
    os.umask(0o077)
    try:
        if user != "-":
            _become(user)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != int(parent):
            sys.exit("the supervisor died while this child was starting")
        os.execv(command[0], command)  # noqa: S606 - the supervisor's own command, no shell
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        sys.exit(_COULD_NOT_START)


def _become(user: str) -> None:
    uid, gid = (int(number) for number in user.split(":"))
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


if __name__ == "__main__":
    main(sys.argv[1:])
