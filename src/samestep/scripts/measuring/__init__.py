"""Where the seconds of steps go: clocks, traces, what is slow, what to change."""
