"""kvtier keeps a language model's KV cache alive beyond the engine's memory: in DRAM and on disk.

    kvtier.Cache, Namespace, Pool, Request   the cache (kvtier.cache)
    kvtier.Layout, Part, Place, Keys, pages  its shapes and keys (kvtier.layout)
    kvtier.codec, kvtier.session             the codec alone; sessions
    kvtier.transformers, kvtier.llama_cpp    engines: imported by name, never by this module
    python -m kvtier doctor                  what is found here, and what would not work

The library itself (libkvtier) is loaded by the first call that needs it, not by the import.
"""
from ._c import VERSION as __version__
from ._errors import (BusyError, ClosedError, ConfigError, ErrorCode, KvtierError, LibraryError,
                      UnsupportedError)
from .cache import (Cache, Cut, Lookup, Namespace, Plan, Pool, Reason, Report, Request, Write,
                    usable_blocks)
from .layout import (KEY_SCHEME, Dtype, Group, GroupKind, Identity, Keys, Kind, Layout, Level,
                     Pages, Part, Place, Tier, layout_of, pages)

__all__ = ["BusyError", "Cache", "ClosedError", "ConfigError", "Cut", "Dtype", "ErrorCode", "Group",
           "GroupKind", "Identity", "KEY_SCHEME", "Keys", "Kind", "KvtierError", "Layout", "Level",
           "LibraryError", "Lookup", "Namespace", "Pages", "Part", "Place", "Plan", "Pool",
           "Reason", "Report", "Request", "Tier", "UnsupportedError", "Write", "__version__",
           "layout_of", "pages", "usable_blocks"]
