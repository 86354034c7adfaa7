"""kv_connector_extra_config: the options of this connector, and those of the library behind it."""
from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cache import check_options, each_option
from .._errors import ConfigError

_log = logging.getLogger("vllm.kvtier")
_OWN = {
    "load": "async (default): the engine goes on while blocks arrive; sync: the step waits for them; "
            "layers: the step waits before each layer for that layer alone",
    "weights_digest": "identity of the weights instead of a digest of their files",
    "salt": "tenant salt: caches of different salts share no block",
    "pages": "auto (default), or opaque: store pages as bytes, exact and not coded",
}


@dataclass(frozen=True)
class Settings:
    """What the connector was told. options: for kvtier.Cache; the rest is its own."""

    options: dict[str, Any] = field(default_factory=dict)
    load: str = "async"
    weights_digest: str = ""
    salt: bytes = b""
    opaque: bool = False

    @property
    def load_async(self) -> bool:
        """Whether requests wait for their blocks outside of steps."""
        return self.load == "async"

    @property
    def daemon(self) -> bool:
        """Whether the store lives in kvtierd and can be shared by processes."""
        return str(self.options.get("store", "")).startswith("unix:")


def policy_can_be_set() -> bool:
    """Whether this version's scheduler looks at kv_load_failure_policy after it has made its
    connector, which may say "recompute" until then."""
    from vllm.v1.core.sched.scheduler import Scheduler
    try:
        text = inspect.getsource(Scheduler.__init__)
    except (OSError, TypeError):
        return False
    made, looked = text.find("create_connector("), text.find("kv_load_failure_policy")
    return 0 <= made < looked


def recompute_failed_loads(transfer: Any) -> None:
    """A block that is evicted between look-up and load is computed, instead of failing its request:
    that is not vLLM's default, and the only policy that makes sense for a cache. ConfigError: it has
    to be set by hand."""
    if getattr(transfer, "kv_load_failure_policy", "recompute") == "recompute":
        return
    if not policy_can_be_set():
        raise ConfigError('kvtier: set "kv_load_failure_policy": "recompute" in '
                          "--kv-transfer-config: a block that was evicted between look-up and load "
                          "is computed then, instead of failing the request")
    transfer.kv_load_failure_policy = "recompute"
    _log.info('kvtier: kv_load_failure_policy is "recompute" from here on, so that a block that is '
              "evicted between look-up and load is computed (below MultiConnector set it there)")


def parse(extra: Mapping[str, Any] | None) -> Settings:
    """Settings of the extra config. ConfigError names a key that does not exist, with the nearest
    that does, and a value that makes no sense."""
    extra = dict(extra or {})
    load = str(extra.pop("load", "async"))
    if load not in ("async", "sync", "layers"):
        raise ConfigError(f"kv_connector_extra_config: load={load!r} is none of async, sync and "
                          "layers")
    digest = str(extra.pop("weights_digest", ""))
    salt = str(extra.pop("salt", "")).encode()
    pages = str(extra.pop("pages", "auto"))
    if pages not in ("auto", "opaque"):
        raise ConfigError(f"kv_connector_extra_config: pages={pages!r} is neither auto nor opaque")
    known = [name for name, _, _ in each_option()]
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(str(key), [*known, *_OWN], 1)
            raise ConfigError(f"kv_connector_extra_config: no option is called {key!r}" +
                              (f"; did you mean {near[0]!r}?" if near else
                               f"; there are {', '.join(sorted([*known, *_OWN]))}"))
    try:
        check_options(extra)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}", error.code) from None
    return Settings(extra, load, digest, salt, pages == "opaque")
