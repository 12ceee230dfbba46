"""Real daemons as processes, real gRPC, signals under load: what callers were told is held against what came."""
