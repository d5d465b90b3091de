"""What keeps a store healthy: gc, verify, retention, repair, rebuild, rekey, copies. Local stores only."""
