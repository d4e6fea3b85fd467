"""Native-speed paths for the CPU."""
