"""Three environments with the classes of `verifiers`, without data sets: one turn, several turns, and tools."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """One turn, two weighted rewards, and a metric."""

    @vf.reward(weight=0.75)
    async def is_right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def is_short(self, trace) -> float:
        return float(len(trace.last_reply) <= 3)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            data = SumData(prompt=f"{n} + {n + 1} = ?", system_prompt="Answer with a number.", answer=str(2 * n + 1))
            yield Sum(data, self.config.task)


class GuessData(vf.TaskData):
    number: int = 0


class Guess(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def too_many(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.reward
    async def found(self, task, trace) -> float:
        return float(trace.last_reply == str(task.number)) / trace.num_turns


class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        return [Guess(GuessData(prompt=f"Game {n}: guess a number.", number=n), self.config.task) for n in range(9)]


class Game(vf.Env[vf.SingleAgentEnvConfig]):
    """Several turns: the environment is the user."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            guess = await talk.turn()
            while not guess.terminated and guess.last_reply != str(task.data.number):
                hint = "higher" if guess.last_reply < str(task.data.number) else "lower"
                guess = await talk.turn(f"It is {hint}.")

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_metric("stopped", float(trace.stop_condition == "too_many"))


class Stock(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "stock"

    async def setup_task(self, task):
        self.apples = task.apples

    @vf.tool
    async def count(self, fruit: str) -> str:
        """How many there are."""
        if fruit != "apples":
            raise ValueError(f"no {fruit} here")
        return str(self.apples)


class FruitData(vf.TaskData):
    apples: int = 0


class Fruit(vf.Task[FruitData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Stock(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.apples))

    @vf.metric
    async def calls(self, trace) -> float:
        return len(trace.tool_messages)


class Fruits(vf.Taskset[Fruit, vf.TasksetConfig]):
    def load(self):
        return [Fruit(FruitData(prompt="How many apples?", apples=n), self.config.task) for n in range(4, 9)]


EXPORTS = {"toy_sums": (Sums,), "toy_guesses": (Guesses, Game), "toy_fruits": (Fruits,)}  # by the id of the taskset
