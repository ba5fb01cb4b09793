"""Finding what will turn a server's output to garbage before a GPU is rented:
`assay-kernels audit`."""

from assay_kernels.audit import render
from assay_kernels.audit.rule import Finding, Rule, Severity, all_rules
from assay_kernels.audit.run import Report, audit

__all__ = ["Finding", "Report", "Rule", "Severity", "all_rules", "audit", "render"]
