"""The model in float64 numpy, one token at a time: slow and obviously correct."""

import numpy as np

from gspax.config import layer_places, layers_of


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * scale


def head_norm(x, scale, eps):
    """The norm of one head's query or key; without a scale the model has none."""
    return x if scale is None else rms_norm(x, scale, eps)


def rotate(x, position, config):
    rotated = int(len(x) * config.rope_fraction)
    return np.concatenate([rotate_all(x[:rotated], position, config), x[rotated:]])


def rotate_all(x, position, config):
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        frequency = config.rope_theta ** (-i / half)
        if config.rope_scaling is not None:
            frequency *= yarn_share(i, half, config) + (1 - yarn_share(i, half, config)) / config.rope_scaling.factor
        angle = position * frequency
        a, b = (2 * i, 2 * i + 1) if config.rope_interleaved else (i, i + half)
        out[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
        out[b] = x[b] * np.cos(angle) + x[a] * np.sin(angle)
    return out * yarn_factor(config.rope_scaling)


def yarn_share(i, half, config):
    """The share of its frequency that pair i keeps: 1 if it turns often within the original context, 0 if rarely.

    Pair i turns r = context * theta ** (-i / half) / 2π times, so i = half * ln(context / 2πr) / ln(theta).
    """
    yarn = config.rope_scaling
    low, high = (
        half * np.log(yarn.original_max_position_embeddings / (2 * np.pi * turns)) / np.log(config.rope_theta)
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if i <= low:
        return 1.0
    return 0.0 if i >= high else (high - i) / (high - low)


def yarn_factor(yarn):
    """The scale of queries and of keys; attention scores carry its square."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    numerator, denominator = (yarn.mscale, yarn.mscale_all_dim) if yarn.mscale and yarn.mscale_all_dim else (1, 0)
    return (1 + numerator * np.log(yarn.factor) / 10) / (1 + denominator * np.log(yarn.factor) / 10)


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def choose(score, bias, config):
    """The ids of the chosen experts, best first: of the best groups, by score and bias."""
    router, worth = config.router, score + bias
    groups = np.split(np.arange(len(worth)), router.groups)
    if router.groups > 1:
        best = sorted(groups, key=lambda group: -np.sort(worth[group])[-2:].sum())
        groups = best[: router.top_groups]
    allowed = sorted(np.concatenate(groups))
    return np.array(sorted(allowed, key=lambda expert: -worth[expert])[: config.num_experts_per_tok])


def swiglu(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def layer_params(params, config, layer):
    """The float64 parameters of one layer, found in its stack."""
    (first, *rest), pick = layer_places(config)[layer]
    stack = params["runs"][first][rest[0]] if rest else params["runs"][first]

    def take(tree):
        return {
            name: take(leaf) if isinstance(leaf, dict) else np.asarray(leaf[pick], np.float64)
            for name, leaf in tree.items()
        }

    return take(stack)


def delta_net(p, x_TD, eps):
    """A gated delta net: outputs of one sequence, token by token; arXiv 2412.06464 with the gates of Qwen3-Next."""
    p, x_TD = ({name: np.asarray(leaf, np.float64) for name, leaf in p.items()}, np.asarray(x_TD, np.float64))
    (_, K, H), (_, _, R, U) = p["query"].shape, p["value"].shape
    out_TD, memory_KRHU = np.zeros_like(x_TD), np.zeros((K, R, H, U))

    def convolved(name, t, taken):
        taps, J = p[f"{name}_taps"], p[f"{name}_taps"].shape[-1] - 1
        inputs = [(j, x_TD[t - J + j]) for j in range(J + 1) if t - J + j >= 0]
        return silu(sum(np.tensordot(x, p[name], 1)[taken] * taps[taken][..., j] for j, x in inputs))

    for t, x in enumerate(x_TD):
        for k in range(K):
            q, key = convolved("query", t, k), convolved("key", t, k)
            q, key = q / np.sqrt((q * q).sum() + 1e-6) / np.sqrt(H), key / np.sqrt((key * key).sum() + 1e-6)
            for r in range(R):
                value, gate = convolved("value", t, (k, r)), x @ p["gate"][:, k, r]
                a, beta = x @ p["decay"][:, k, r] + p["decay_bias"][k, r], sigmoid(x @ p["beta"][:, k, r])
                memory = memory_KRHU[k, r] * np.exp(-np.exp(p["decay_rate"][k, r]) * np.logaddexp(0, a))
                memory = memory + beta * np.outer(key, value - memory.T @ key)
                memory_KRHU[k, r] = memory
                y = memory.T @ q
                y = y / np.sqrt((y * y).mean() + eps) * p["norm"] * silu(gate)
                out_TD[t] += y @ p["out"][k, r]
    return out_TD


def state_space(p, x_TD, eps):
    """A state space layer (Mamba-2): outputs of one sequence, token by token; arXiv 2405.21060, a state [H, U]."""
    p, x_TD = ({name: np.asarray(leaf, np.float64) for name, leaf in p.items()}, np.asarray(x_TD, np.float64))
    (_, K, H), (_, _, R, U) = p["read"].shape, p["input"].shape
    out_TD, memory_KRHU = np.zeros_like(x_TD), np.zeros((K, R, H, U))

    def convolved(name, t):
        taps, J = p[f"{name}_taps"], p[f"{name}_taps"].shape[-1] - 1
        inputs = [(j, x_TD[t - J + j]) for j in range(J + 1) if t - J + j >= 0]
        return silu(sum(np.tensordot(x, p[name], 1) * taps[..., j] for j, x in inputs) + p[f"{name}_bias"])

    for t, x in enumerate(x_TD):
        read_KH, write_KH, input_KRU = (convolved(name, t) for name in ("read", "write", "input"))
        for k in range(K):
            y_RU = np.zeros((R, U))
            for r in range(R):
                dt = np.logaddexp(0, x @ p["step"][:, k, r] + p["decay_bias"][k, r])
                kept = np.exp(-dt * np.exp(p["decay_rate"][k, r])) * memory_KRHU[k, r]
                memory_KRHU[k, r] = kept + dt * np.outer(write_KH[k], input_KRU[k, r])
                y = read_KH[k] @ memory_KRHU[k, r] + p["skip_scale"][k, r] * input_KRU[k, r]
                y_RU[r] = y * silu(x @ p["gate"][:, k, r])
            y_RU = y_RU / np.sqrt((y_RU * y_RU).mean() + eps) * p["norm"][k]
            out_TD[t] += np.tensordot(y_RU, p["out"][k], 2)
    return out_TD


def attend_to_latents(a, h_T, config):
    """The output of latent attention for each token, from its normalized input."""
    latent, N, yarn, keys, values, added = config.latent, config.num_attention_heads, config.rope_scaling, [], [], []
    scale = 1 / np.sqrt(latent.nope_dim + config.head_dim)
    if yarn is not None and yarn.mscale_all_dim:
        scale *= (1 + yarn.mscale_all_dim * np.log(yarn.factor) / 10) ** 2
    for t, h in enumerate(h_T):
        c = rms_norm(h @ a["latent"], a["latent_norm"]["scale"], 1e-6)
        rotated = rotate(h @ a["rotated_key"], t, config)
        keys.append([np.concatenate([c @ a["key"][:, n], rotated]) for n in range(N)])
        values.append([c @ a["value"][:, n] for n in range(N)])
        if latent.query_rank:
            h = rms_norm(h @ a["query_latent"], a["query_norm"]["scale"], 1e-6)
        y = 0
        for n in range(N):
            plain, to_rotate = np.split(h @ a["query"][:, n], [latent.nope_dim])
            q = np.concatenate([plain, rotate(to_rotate, t, config)])
            share = softmax(np.array([q @ keys[s][n] * scale for s in range(t + 1)]))
            y += sum(w * values[s][n] for s, w in enumerate(share)) @ a["out"][n]
        added.append(y)
    return added


def forward(params, config, tokens, forced=None, streams=None):
    """Logits `[T, V]` of one unpadded sequence, and the expert ids `[sparse layers, T, A]`, best first.

    The embeddings and each layer's residual stream, `[T, D]`, are appended to the list `streams` if it is given.
    """
    embedding = np.asarray(params["embedding"], np.float64)
    head = np.asarray(params["head"], np.float64) if "head" in params else embedding.T
    K, N, H = config.num_key_value_heads, config.num_attention_heads, config.head_dim
    xs = [embedding[token] for token in tokens]
    experts, streams = [], [] if streams is None else streams
    streams.append(np.array(xs))
    for index in range(config.num_hidden_layers):
        p = layer_params(params, config, index)
        a, eps = p["attention"], config.rms_norm_eps
        keys, values, attended = [], [], []
        if config.latent is not None:
            h_T = [rms_norm(x, p["attention_norm"]["scale"], eps) for x in xs]
            attended = [x + y for x, y in zip(xs, attend_to_latents(a, h_T, config), strict=True)]
        unit = {"query_norm": {"scale": None}, "key_norm": {"scale": None}}
        zero = {"query_bias": np.zeros((N, H)), "key_bias": np.zeros((K, H)), "value_bias": np.zeros((K, H))}
        a = {**zero, "out_bias": 0.0, **unit, **a}
        window = config.sliding_window if index in config.sliding_layers and config.sliding_window else len(xs)
        for t, x in enumerate(xs if config.latent is None else []):
            h = rms_norm(x, p["attention_norm"]["scale"], eps)
            q = [h @ a["query"][:, n] + a["query_bias"][n] for n in range(N)]
            q = [rotate(head_norm(each, a["query_norm"]["scale"], eps), t, config) for each in q]
            k = [h @ a["key"][:, k] + a["key_bias"][k] for k in range(K)]
            keys.append([rotate(head_norm(each, a["key_norm"]["scale"], eps), t, config) for each in k])
            values.append([h @ a["value"][:, k] + a["value_bias"][k] for k in range(K)])
            y = a["out_bias"] + np.zeros_like(x)
            seen = range(max(0, t + 1 - window), t + 1)  # `window` positions, t itself the last
            for n in range(N):
                k = n // (N // K)
                share = softmax(np.array([q[n] @ keys[s][k] / np.sqrt(H) for s in seen]))
                y += sum(w * values[s][k] for s, w in zip(seen, share, strict=True)) @ a["out"][n]
            attended.append(x + y)
        xs, chosen = [], []
        for t, x in enumerate(attended):
            h = rms_norm(x, p["mlp_norm"]["scale"], eps)
            m = p["mlp"]
            if not layers_of(config)[index].sparse:
                xs.append(x + swiglu(h, m["gate"], m["up"], m["down"]))
                continue
            prob = (softmax if config.router.scoring == "softmax" else sigmoid)(h @ m["router"])
            ids = choose(prob, m.get("correction_bias", 0.0), config)
            if forced is not None:
                ids = forced[len(experts)][t]
            gates = prob[ids] / prob[ids].sum() if config.norm_topk_prob else prob[ids]
            gates = gates * config.router.scale
            y = sum(g * swiglu(h, m["gate"][e], m["up"][e], m["down"][e]) for g, e in zip(gates, ids, strict=True))
            if config.shared_expert_intermediate_size:
                shared = swiglu(h, m["shared"]["gate"], m["shared"]["up"], m["shared"]["down"])
                y = y + shared * (sigmoid(h @ m["shared_gate"]) if config.shared_expert_gate else 1)
            xs.append(x + y)
            chosen.append(ids)
        streams.append(np.array(xs))
        if layers_of(config)[index].sparse:
            experts.append(chosen)
    scale = np.asarray(params["norm"]["scale"], np.float64)
    return np.array([rms_norm(x, scale, config.rms_norm_eps) @ head for x in xs]), np.array(experts)
