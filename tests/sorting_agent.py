"""An agent that asks three times: its second request begins another sequence."""

import json
import urllib.request


def ask(endpoint, *texts):
    """Answer a conversation, as the policy goes on with it."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    body = json.dumps({"model": endpoint.model, "messages": messages, "max_tokens": 4}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def solve(problem, endpoint):
    """Let the policy sort two digits first, then go on with its first answer."""
    first = ask(endpoint, problem.prompt)
    part = ask(endpoint, problem.prompt[:2] + "=")
    return ask(endpoint, problem.prompt, first, part[:1] + "=")
