"""Where the gateway will listen, and how a client on this machine reaches it."""

import errno
import socket
from dataclasses import dataclass

from cli.errors import CommandFailed

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - recognised, not bound


class CannotListen(CommandFailed):
    """The address cannot be listened on."""


@dataclass(frozen=True, slots=True)
class ListeningAddress:
    """An address that was free when it was looked at."""

    host: str
    port: int

    @classmethod
    def claim(cls, host: str, port: int) -> "ListeningAddress":
        """Check that the address is free; port 0 chooses one that is. Raises CannotListen."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As servers do: connections of an earlier run that linger do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)
                return cls(host, probe.getsockname()[1])
        except OSError as error:
            raise CannotListen(f"Cannot listen on {host} port {port}: {_reason(error)}") from error

    @property
    def reachable_host(self) -> str:
        """The host by which a client on this machine reaches the address."""
        return _ANY.get(self.host, self.host)

    @property
    def origin(self) -> str:
        """The address as a URL for a client on this machine."""
        host = self.reachable_host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def _reason(error: OSError) -> str:
    """What is wrong, and what to do about it."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            "that is no address of this machine. Choose with --host: 127.0.0.1 for clients on "
            "this machine alone, 0.0.0.0 for every address that it has, or one of them."
        )
    if error.errno == errno.EADDRINUSE:
        return "it is taken. Stop what listens there, or choose another port with --port."
    if error.errno == errno.EACCES:
        return "this user may not. Choose a port of 1024 or more with --port."
    return f"{error.strerror or error}. Choose another address with --host and --port."
