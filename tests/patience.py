"""How long a test waits for another process: against hanging, not a measure. A busy machine takes several times as long as a quiet one."""

PATIENCE = 900
