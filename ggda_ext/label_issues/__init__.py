"""Which training labels are wrong? Loss, self-influence and influence on clean points, ranked together."""

from ggda_ext.label_issues.result import Agreement, LabelIssues
from ggda_ext.label_issues.signals import find_label_issues

__all__ = ["find_label_issues", "LabelIssues", "Agreement"]
