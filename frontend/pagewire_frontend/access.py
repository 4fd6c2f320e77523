"""Who may ask, and how often: what the HTTP and the gRPC API both enforce."""

from __future__ import annotations

from pathlib import Path

from pagewire_frontend.api_keys import ApiKeys
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.request_limits import RequestLimits

# What only tells how things are, and takes nothing of the model: a page may ask often.
UNCOUNTED_CALLS = frozenset(
    f"/pagewire.v1.{name}"
    for name in (
        "Inference/ListModels",
        "Inference/ListChatTemplates",
        "Adapters/List",
        "Observability/WatchStats",
    )
)
UNCOUNTED_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))


class Access:
    """Keys and limits of one frontend process.

    Raises:
        SettingsError: the keys can't be used.
    """

    def __init__(self, config: FrontendConfig) -> None:
        # An empty key is refused there: whoever gave it does not want an open server.
        given = () if config.api_key is None else config.api_key.get_secret_value().split(",")
        self.keys = ApiKeys(
            given,
            None if config.api_key_file is None else Path(config.api_key_file),
        )
        self._limits = RequestLimits(config.max_requests_per_minute, config.max_concurrent_requests)

    def tenant(self, authorization: str | None) -> str:
        """See `ApiKeys.tenant`."""
        return self.keys.tenant(authorization)

    def enter(self, tenant: str) -> None:
        """A request begins; `leave` when it has ended.

        Raises:
            ResourceExhaustedError: it is one too many.
        """
        self._limits.enter(self._limited(tenant))

    def leave(self, tenant: str) -> None:
        """A request that had entered has ended."""
        self._limits.leave(self._limited(tenant))

    def _limited(self, tenant: str) -> str:
        # A name that nobody has checked could be another one each time.
        return tenant if self.keys.required else ""
