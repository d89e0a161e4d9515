"""From rows to sentences: statistics, claims and verdicts, the gap decomposed, figures and pages."""
