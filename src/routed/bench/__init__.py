"""Measurements that back the claims on speed: `python -m routed.bench NAME --json FILE [--baseline=CMD]`."""
