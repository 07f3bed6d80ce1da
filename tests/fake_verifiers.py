"""The parts of verifiers 0.4 and mcp 2 that gspax uses, in little code, for tests where they are not installed."""

import copy
import inspect
import itertools
import sys
from contextlib import asynccontextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace


class Record:
    """A pydantic model without validation. `Class[A, B]` is a subclass that knows A and B."""

    types = ()

    def __init__(self, **fields):
        vars(self).update(fields)
        self.model_fields_set = set(fields)

    def __class_getitem__(cls, types):
        return type(cls.__name__, (cls,), {"types": types if isinstance(types, tuple) else (types,)})

    def __iter__(self):
        return iter(vars(self).items())

    def model_copy(self, update):
        new = copy.copy(self)
        vars(new).update(update)
        return new

    def model_dump(self, mode=None, include=None):
        fields = {name: value for name, value in vars(self).items() if name != "model_fields_set"}
        return {name: value for name, value in fields.items() if include is None or name in include}

    @classmethod
    def model_validate(cls, data):
        return cls(**data)


def mark(kind, **extra):
    def decorate(function=None, **options):
        if function is None:
            return lambda function: decorate(function, **options)
        vars(function).update({kind: True}, **extra | options)
        return function

    return decorate


def discover_decorated(obj, kind):
    names = {name for base in type(obj).__mro__ for name, value in vars(base).items() if hasattr(value, kind)}
    return [getattr(obj, name) for name in sorted(names)]


def invoke(function, available):
    wanted = inspect.signature(function).parameters.items()
    return function(**{n: available.get(n, available.get(p.annotation)) for n, p in wanted})


class TaskData(Record):
    idx = prompt = system_prompt = None

    @property
    def prompt_text(self):
        return self.prompt if isinstance(self.prompt, str) else "\n".join(m["content"] for m in self.prompt)


class Task(Record):
    toolsets = classmethod(lambda cls, config: [])
    data_type = classmethod(lambda cls: cls.types[0])
    key = hash = "k"

    def __init__(self, data, config=None):
        self.data, self.config = data, config

    def hooks(self, kind):
        return discover_decorated(self, kind)

    async def setup(self, trace, runtime): ...

    async def finalize(self, trace, runtime): ...

    async def score(self, trace, runtime):
        available = {"task": self.data, "trace": trace, "runtime": runtime}
        for metric in self.hooks("metric"):
            trace.record_metrics({metric.__name__: await invoke(metric, available)})
        for reward in self.hooks("reward"):
            value = await invoke(reward, available)
            for name, score in (value if isinstance(value, dict) else {reward.__name__: value}).items():
                trace.record_reward(name, score, getattr(reward, "weight", 1.0))


class Taskset(Record):
    toolsets = classmethod(lambda cls, config: [])
    task_type = classmethod(lambda cls: cls.types[0])

    def __init__(self, config):
        self.config = config

    def take(self, count):
        for index, task in enumerate(itertools.islice(self.load(), count)):
            task.data.idx = index
            yield task


class Trace(Record):
    def __init__(self, **fields):
        super().__init__(**fields)
        self.nodes, self.rewards, self.metrics, self.stop_condition = [], {}, {}, None

    num_turns = property(lambda self: len([m for m in self.nodes if m.role == "assistant"]))
    tool_messages = property(lambda self: [m for m in self.nodes if m.role == "tool"])
    assistant_messages = property(lambda self: [m for m in self.nodes if m.role == "assistant"])
    last_reply = property(lambda self: [m.content for m in self.nodes if m.role == "assistant"][-1].strip())
    reward = property(lambda self: sum(each.score * each.weight for each in self.rewards.values()))

    def record_reward(self, name, score, weight=1.0):
        self.rewards[name] = SimpleNamespace(score=float(score), weight=weight)

    def record_metric(self, name, value):
        self.metrics[name] = float(value)

    def record_metrics(self, values):
        for name, value in values.items():
            self.record_metric(name, value)

    def stop(self, condition):
        self.stop_condition = self.stop_condition or condition


def prepare_turn(trace, prompt, tools):
    return SimpleNamespace(commit=lambda response: setattr(trace, "nodes", [*prompt, response.message]))


def message(role):
    return lambda **fields: Record(role=role, **{"content": "", "tool_calls": None} | fields)


def parse_message(raw):
    return message(raw["role"])(**{name: value for name, value in raw.items() if name != "role"})


class Segment(Record):
    last_reply = property(lambda self: [m.content for m in self.messages if m.role == "assistant"][-1].strip())


class Agent:
    def __init__(self, config):
        self.config = config

    @asynccontextmanager
    async def provision(self, task):
        yield SimpleNamespace()


class Env(Record):
    def __init__(self, config):
        self.config = config
        self.taskset = find(config.taskset["id"], Taskset)(Record(id=config.taskset["id"], task=Record()))

    async def start(self): ...

    async def stop(self): ...

    async def setup(self, agents): ...

    async def finalize(self, task, episode): ...


class SingleAgentEnv(Env):
    async def run(self, task, agents):
        await agents.agent.run(task)


class AgentConfig(Record):
    max_turns = None


class Toolset(Record):
    def __init__(self, config):
        self.config, self.server_name = config, self.TOOL_PREFIX

    async def setup(self): ...

    def register(self, server):
        server.tools = {tool.__name__: tool for tool in discover_decorated(self, "tool")}


def find(name, kind, default=None):
    return next(
        (each for each in vars(sys.modules[name]).values() if isinstance(each, type) and kind in each.__mro__), default
    )


class MCPServer:
    def __init__(self, name): ...

    async def list_tools(self):
        return [SimpleNamespace(name=n, description=t.__doc__, input_schema=schema(t)) for n, t in self.tools.items()]


def schema(tool):
    names = inspect.signature(tool).parameters
    return {"properties": {name: {"title": name.title(), "type": "string"} for name in names}}


class Client:
    def __init__(self, server):
        self.server = server

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error): ...

    async def call_tool(self, name, arguments):
        try:
            text = await self.server.tools[name](**arguments)
        except ValueError as error:
            text = f"Error executing tool {name}: {error}"
        return SimpleNamespace(content=[SimpleNamespace(type="text", text=text)])


def resolve_env_config(config):
    return Record(taskset=config["taskset"], agent=AgentConfig(**config.get("agent", {})))


def load_environment(config):
    return find(config.taskset["id"], Env, SingleAgentEnv)(config)


def install():
    """Put the modules in place of those that are not installed."""
    plain = ("Episode", "TraceTask", "AgentInfo", "Response", "ToolCall", "Tool", "ToolsetConfig", "TasksetConfig")
    here = {name: value for name, value in globals().items() if not name.startswith("_")}
    here |= {name: type(name, (Record,), {}) for name in (*plain, "State", "TaskConfig", "SubprocessConfig")}
    here |= {"SingleAgentEnvConfig": AgentConfig, "tool": mark("tool"), "stop": mark("stop")}
    here |= {"metric": mark("metric"), "reward": mark("reward")}
    here["ToolsetConfig"].url = None
    here["Agents"] = lambda config, make: SimpleNamespace(agent=make("agent", config.agent))
    for role in ("System", "User", "Assistant", "Tool"):
        here[f"{role}Message"] = message(role.lower())
    here["hook_boundary"] = lambda hook, allow_trace: here["Trace"]
    here["state_cls"] = lambda owner: here["State"]
    inside = ("", ".v1", ".v1.dialects", ".v1.graph", ".v1.session", ".v1.state", ".v1.utils", ".v1.utils.decorators")
    for name in (*(f"verifiers{path}" for path in inside), "mcp", "mcp.server", "mcp.server.mcpserver"):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(here, __spec__=ModuleSpec(name, None))
    sys.modules["verifiers"].v1 = sys.modules["verifiers.v1"]
