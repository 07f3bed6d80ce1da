"""Serves the policy to agents as OpenAI's server would, and records their rollouts token by token."""
