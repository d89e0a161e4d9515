"""The kinds of claims that single papers and experiments use: importing this module adds them to `claims.KINDS`."""

from routed.analysis import crossing, powers, preregistered, recovered_gap, sample_complexity  # noqa: F401
