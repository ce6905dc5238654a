"""How much service each tenant has had, as one number that can be compared.

A tenant's *virtual time* is the service it was charged for, divided by its weight, over all
classes together: what it spends in batches it cannot spend again in conversations. Whoever has
the least is served next. After Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024): while two tenants always have something waiting, their virtual times differ by less
than twice what a single request can be charged, whatever either of them sends.

A tenant that comes back is lifted to the least of those who wait: absence saves nothing up.
Pure bookkeeping: no clock on the wall, no Redis.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """What a token costs in units of service.

    The defaults follow the usual prices: an output token holds the device some four times as
    long as a prompt's, and a cached one is read and not computed.
    """

    uncached_prompt: float = 1.0
    cached_prompt: float = 0.1
    output: float = 4.0

    def charge(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """The service that so many tokens are; `cached_tokens` are part of the prompt's."""
        return (
            self.uncached_prompt * (prompt_tokens - cached_tokens)
            + self.cached_prompt * cached_tokens
            + self.output * completion_tokens
        )


class VirtualTime:
    """The virtual time of every tenant that was ever served.

    `times` is where another dispatcher left off.
    """

    def __init__(self, times: Mapping[str, float] | None = None) -> None:
        self._times = dict(times or {})

    def of(self, tenant_id: str) -> float:
        """The tenant's virtual time; 0 for a stranger until it is lifted."""
        return self._times.get(tenant_id, 0.0)

    def lift(self, tenant_id: str, least: float) -> None:
        """Bring a tenant that comes back up to `least`, the least of those who wait."""
        if self.of(tenant_id) < least:
            self._times[tenant_id] = least

    def charge(self, tenant_id: str, service: float, weight: float = 1.0) -> None:
        """Add service, or take back what was charged too much (`service` < 0)."""
        assert weight > 0.0, f"the weight of tenant {tenant_id} is {weight}"
        self._times[tenant_id] = self.of(tenant_id) + service / weight
