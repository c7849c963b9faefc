"""What every room may use: errors, scopes, reports, ranks, and running a script. Nothing else is shared."""
