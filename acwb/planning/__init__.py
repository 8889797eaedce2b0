"""From a profile and a budget to a plan: what to keep and what to recompute. Without torch."""
