"""Whether a model can follow a grammar, told before the request is accepted."""

import asyncio
from pathlib import Path

from control.errors import Overloaded
from control.protocol.structured_output import Constraint
from control.registry.model_version import ModelVersion
from engine.grammar.grammar_checks import GrammarChecks
from engine.grammar.grammar_compiler import GrammarBusy

CHECK_LIMIT_S = 10.0
RETRY_MS = 2000


class Grammars:
    """The checks of one gateway."""

    def __init__(self) -> None:
        self._checks = GrammarChecks()

    async def check(self, version: ModelVersion, constraint: Constraint) -> None:
        """Raise InvalidRequest if the version cannot follow it, Overloaded if there is no saying.

        Call it once the version's text files are known to be the registered ones.
        """
        folder = Path(version.weights_folder)
        try:
            async with asyncio.timeout(CHECK_LIMIT_S):
                await self._checks.check(folder, constraint.grammar, constraint.param)
        except (GrammarBusy, TimeoutError) as error:
            raise Overloaded(
                f"{constraint.param} could not be checked: too many others wait. Try again later.",
                retry_after_ms=RETRY_MS,
            ) from error

    def close(self) -> None:
        """End what it started."""
        self._checks.close()
