"""The step without torch: its graph, schedules of it, what they cost, and the simulator that predicts them."""
