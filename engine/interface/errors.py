"""What the engine says when a request cannot be served as asked."""


class InvalidRequest(ValueError):
    """The request breaks a rule; `param` names the field and `code` the rule's stable name."""

    def __init__(self, message: str, *, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFull(RuntimeError):
    """The engine holds as many waiting sequences as it may; the request is fine elsewhere."""


class DuplicateRequest(RuntimeError):
    """A request with this id is running here; the second one changed nothing."""
