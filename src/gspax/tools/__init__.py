"""The subcommands that only look at runs or machines, or start others. Nothing outside this package imports it."""
