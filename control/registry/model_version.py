"""What is served under which name.

A model is a public name, a version one set of weights with its limits. `name` stands for the
version that the newest rollout revision puts in force, `name@version` for exactly that one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One set of weights and the limits it is served under; lengths are in tokens."""

    model: str
    version: str
    weights_digest: str
    weights_folder: str
    max_model_len: int
    max_output_tokens: int
    created_at: datetime
    is_in_force: bool

    @property
    def pinned_name(self) -> str:
        """The name that means this version and no other."""
        return f"{self.model}@{self.version}"


@dataclass(frozen=True, slots=True)
class Registry:
    """All versions at one instant, by every name they answer to."""

    by_name: dict[str, ModelVersion] = field(default_factory=dict)

    @classmethod
    def of(cls, versions: Iterable[ModelVersion]) -> "Registry":
        """Index the versions by pinned name, and those in force by model name too."""
        by_name = {}
        for version in versions:
            by_name[version.pinned_name] = version
            if version.is_in_force:
                by_name[version.model] = version
        return cls(by_name)

    @property
    def models(self) -> tuple[str, ...]:
        """Public model names, sorted."""
        return tuple(sorted({version.model for version in self.by_name.values()}))

    def resolve(self, name: str) -> ModelVersion | None:
        """The version that answers to the name, or None."""
        return self.by_name.get(name)
