"""Object storage: conditional writes, a lease with a fencing number, and files by digest."""
