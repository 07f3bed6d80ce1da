"""The script that runs a program in the sandbox. It is sent as text to a bare interpreter.

It reads a marshaled task from the descriptor in its first argument, sets the limits, and runs the program as
`__main__`, or calls one of its functions and writes the result as JSON. Nothing here is secret: the expected output is
in another process.
"""


def _enter(limits: dict[str, int], seconds: float) -> None:
    """Apply the resource limits, and prepare the interpreter for a program."""
    import builtins
    import resource
    import signal
    import sys

    for name, most in limits.items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    signal.setitimer(signal.ITIMER_REAL, seconds)  # the worker kills this process earlier, unless it is gone
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # -S leaves them out
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(50_000)
    sys.argv = ["main.py"]


def _provide(code: str, names: dict[str, object], modules: list[str]) -> None:
    """Add to `names` what a program uses from these modules without an import, as LiveCodeBench's harness permits.

    The harness imports all names of each module, then of builtins, then the modules. Here only used names are imported,
    because some modules take longer than most programs.
    """
    import builtins
    import symtable

    tables = [top := symtable.symtable(code, "main.py", "exec")]
    used: set[str] = set()
    bound = {*vars(builtins)}
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                (bound if symbol.is_assigned() or symbol.is_imported() else used).add(symbol.get_name())
    missing = {name for name in used - bound if not name.startswith("__")}
    for name in missing & {*modules} - {"typing"}:  # the harness does not import typing itself
        names[name] = __import__(name)
    for name in reversed(modules):
        if not (missing := missing - names.keys()):
            break
        module = vars(__import__(name))
        exported = module.get("__all__") or [each for each in module if each[0] != "_"]
        names.update({each: module[each] for each in missing.intersection(exported)})


def _call(code: str, modules: list[str], name: str, arguments: list[object]) -> None:
    """Run a program, call its function or the method of its `Solution`, and write the result as JSON."""
    import json
    import os
    import sys
    import types

    channel = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    names = module.__dict__
    compiled = compile(code, "main.py", "exec")
    _provide(code, names, modules)
    exec(compiled, names)
    owner = names["Solution"]() if "Solution" in names else None
    function = names[name] if owner is None else getattr(owner, name)
    data = memoryview(json.dumps(function(*arguments)).encode())
    while data:
        data = data[os.write(channel, data) :]
    os._exit(0)


def _main() -> None:
    import marshal
    import os
    import sys

    with os.fdopen(int(sys.argv[1]), "rb") as file:
        task = marshal.load(file)
    _enter(task["limits"], task["seconds"])
    if task["function"]:
        _call(task["code"], task["modules"], task["function"], task["arguments"])
    names = sys.modules["__main__"].__dict__
    compiled = compile(task["code"], "main.py", "exec")
    _provide(task["code"], names, task["modules"])
    for name in ("_enter", "_provide", "_call", "_main"):
        del names[name]
    exec(compiled, names)


if __name__ == "__main__":
    _main()
