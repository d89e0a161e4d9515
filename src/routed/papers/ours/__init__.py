"""Our own questions: the arms that their experiments alone use."""

from routed.papers.ours import arms
from routed.plan.arms import ARMS

ARMS.update(arms.ARMS)
