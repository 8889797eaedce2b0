"""Planners decide what to keep and what to run again; each is a function of a profile and a budget."""
