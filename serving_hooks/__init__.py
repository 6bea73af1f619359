"""What runs inside the engine's process: the capture hook, and one room per engine."""
