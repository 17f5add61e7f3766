"""Which training labels are wrong? Loss, self-influence and influence on clean points, ranked together."""

from ggda_ext.label_issues.finding import find_label_issues
from ggda_ext.label_issues.issues import Agreement, LabelIssues

__all__ = ["find_label_issues", "LabelIssues", "Agreement"]
