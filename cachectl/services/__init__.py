"""What the commands do, one use case a file, without printing: plan, build, verify, list, inspect, doctor."""
