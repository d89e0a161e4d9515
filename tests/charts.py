"""Helpers that read charts in tests: rows of marks, texts, and labels of ticks."""


def rows(panel, label=None, kind="means"):
    """The rows of a kind of mark, of one series or of all."""
    return [row for row in panel.rows.get(kind, ()) if label is None or row["series"] == label]


def values(panel, label, field="value"):
    """A field of the means of a series."""
    return [row[field] for row in rows(panel, label)]


def labels(axis):
    """The labels of an axis' ticks."""
    return [*axis.ticks.values()]


def texts(panel):
    """The texts on a panel."""
    return [row["text"] for row in panel.rows.get("texts", ())] + [
        row["label"] for row in panel.rows.get("cells", ()) if row["label"]
    ]
