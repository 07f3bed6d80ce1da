"""From prompts to rewarded rollouts: the sampler, the devices it runs on, rewards and advantages."""
