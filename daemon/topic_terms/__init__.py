"""What holds for one topic: settings, quotas, the way of its decisions into slots, and what its parts see of it."""
