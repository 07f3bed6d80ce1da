"""Rewards for verifiable tasks: mathematical equality, formats, lengths and tests of programs.

A reward is a plain function `(problem, completion) -> float`; `functools.partial` sets its keyword-only parameters. See
docs/rewards.md.
"""
