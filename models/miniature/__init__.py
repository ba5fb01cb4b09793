"""The miniature DeepSeek V4: its closed world, its training and its export."""
