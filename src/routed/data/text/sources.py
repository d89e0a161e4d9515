"""Where text comes from, by the config key `data.name`."""

from __future__ import annotations

from routed.data.text.generated import generated
from routed.data.text.jsonl import mc4_jsonl
from routed.data.text.prepared import tfds

#: name -> function (config.data) -> Source.
SOURCES = {"mc4_jsonl": mc4_jsonl, "tfds": tfds, "generated": generated}
