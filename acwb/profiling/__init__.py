"""Measures every op of a captured step: time, workspace, swap; devices and process memory."""
