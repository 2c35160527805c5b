"""What decides in a user's code: the functions, classes and values that a file reaches.

The code is parsed and never run. Comments, layout, docstrings and imports that nothing uses are
left out. Of the modules that a file imports, only what the file reaches counts.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samestep.base.run.code_source import ModuleText, Parts, source_of

Pieces = dict[str, str]
"""The name of each function and value → its code, or `name = value`."""
Find = Callable[[str], Path | None]
"""The dotted name of a module → its file, if it is the user's own."""
_SHOWN = 40
_IMPORT = "import of "
_MAIN = "`if __name__ == '__main__':`"
_EVERYTHING = frozenset({"globals", "eval", "exec"})
"""A function that calls one of these may use any name of its module."""


def no_user_module(_name: str) -> None:
    """Find no module that is the user's own."""


def file_pieces(file: Path) -> Pieces:
    """Return the pieces of a script with its main block, without its imports."""
    return reached_pieces(file, no_user_module, main_block=True)


def reached_pieces(
    file: Path, find: Find, whole: Collection[str] = (), *, main_block: bool = False
) -> Pieces:
    """Return the pieces of a file, and those that it uses in the user's own modules.

    `whole` names modules that count as a whole, since no import statement leads to them. Of a
    script the `main_block` runs, too.
    """
    return _Reach(find, main_block=main_block).pieces_of(file, whole)


def named_pieces(names: Iterable[Parts], find: Find) -> Pieces:
    """Return the pieces of the user's own modules that dotted names lead to."""
    reach = _Reach(find)
    for parts in sorted(names):
        reach.follow(parts)
    return reach.pieces()


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of pieces that are not the same, with short values."""
    changes = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        only_one = old is None or new is None
        if old == new or (only_one and name.startswith(_IMPORT)):  # its use differs, too
            continue
        start = f"{name.partition(' in ')[0]} = "
        values = [text.removeprefix(start) for text in (old, new) if text and text[:1] != "#"]
        short = len(values) == 2 and all(len(v) <= _SHOWN and not {*v} & {*"\n#"} for v in values)
        if only_one:
            changes.append(f"{name} ({'new' if old is None else 'gone'})")
        elif short and old and old.startswith(start):
            changes.append(f"{name} (was {values[0]}, is {values[1]})")
        else:
            changes.append(name)
    return changes


def module_path(name: str, file: Path) -> str:
    """Return a module's path below the folder that it is imported from."""
    end = "/__init__.py" if file.name == "__init__.py" else ".py"
    return name.replace(".", "/") + end


@dataclass
class _Reach:
    """Follows a file to what it uses in modules of the user's own."""

    find: Find
    sources: dict[str, ModuleText] = field(default_factory=dict)
    """By the module's name; "" is the file itself."""
    files: dict[str, Path] = field(default_factory=dict)
    taken: dict[str, set[int]] = field(default_factory=dict)
    """Of each module that is imported, the places of the statements that count."""
    stands_for: dict[tuple[str, str], str] = field(default_factory=dict)
    """(module, name that it imports) → the dotted name of what that is."""
    waiting: list[tuple[str, int]] = field(default_factory=list)
    """Statements that were taken, and whose uses were not followed yet."""
    main_block: bool = False

    def pieces_of(self, file: Path, whole: Iterable[str] = ()) -> Pieces:
        self.files[""], self.sources[""] = file, source_of(file)
        self._run("")
        for place, statement in enumerate(self.sources[""].statements):
            if not statement.names or not statement.names <= self.sources[""].unused:
                self._include("", place)
        self._use("", ("recipe",))  # another module may have it
        for name in whole:
            self.follow(tuple(name.split(".")))
        return self.pieces()

    def pieces(self) -> Pieces:
        while self.waiting or self._include_subclasses():
            while self.waiting:
                self._follow_uses(*self.waiting.pop())
        pieces: Pieces = {}
        for module, places in self.taken.items():
            label = f" in {module_path(module, self.files[module])}" if module else ""
            statements = self.sources[module].statements
            parts = [piece for place in sorted(places) for piece in statements[place].pieces]
            parts += [
                (f"{_IMPORT}{name}", f"{_IMPORT}{name} = {target}")
                for (where, name), target in sorted(self.stands_for.items())
                if where == module
            ]
            for name, text in parts:  # a name that is given twice has both
                shown = name + label
                pieces[shown] = "\n".join(filter(None, (pieces.get(shown), text)))
        return pieces

    def _load(self, module: str) -> ModuleText | None:
        """Return the parsed text of a module, if it is the user's own."""
        if module not in self.sources:
            file = self.find(module)
            if file is None:
                return None
            self.files[module] = file
            self.sources[module] = source_of(file, module)
        return self.sources[module]

    def _run_all(self, name: str) -> bool:
        """Import a module with the packages above it; return whether it is the user's own."""
        parts = name.split(".")
        return [self._run(".".join(parts[: n + 1])) for n in range(len(parts))][-1]

    def _run(self, module: str) -> bool:
        """Include the statements that act on import; return whether the module is the user's."""
        source = self._load(module)
        if source is None or module in self.taken:
            return source is not None
        self.taken[module] = set()
        for name in sorted(source.imports):
            self._run_all(name)
        for place, part in enumerate(source.statements):
            if part.acts or any(self._registers(module, chain) for chain in part.decorators):
                self._include(module, place)
        return True

    def _registers(self, module: str, decorator: Parts) -> bool:
        """Whether a decorator may register what it decorates."""
        source = self.sources[module]
        if decorator[0] in source.places:
            return True
        target = (*source.bound.get(decorator[0], decorator[:1]), *decorator[1:])
        called = ".".join(target).lower()
        return bool(self._place(target)[0]) or "register" in called or "registry" in called

    def _include_subclasses(self) -> bool:
        """Let subclasses of a class that registers them count; return whether any were new."""
        classes = [
            (module, place, s)
            for module in [*self.taken]
            for place, s in enumerate(self.sources[module].statements)
            if s.bases or s.hooks
        ]
        names = {name for _, _, s in classes if s.hooks for name in s.names}
        while more := {n for _, _, s in classes if s.bases & names for n in s.names} - names:
            names |= more
        subclasses = [(m, p) for m, p, s in classes if s.bases & names and p not in self.taken[m]]
        for module, place in subclasses:
            self._include(module, place)
        return bool(subclasses)

    def _include_all(self, module: str) -> None:
        for place in range(len(self.sources[module].statements)):
            self._include(module, place)

    def _include(self, module: str, place: int) -> None:
        source = self.sources[module]
        is_new = place not in self.taken[module]
        name, text = next(iter(source.statements[place].pieces), ("", ""))
        # The block that an import does not run.
        is_main = name == _MAIN and "\nelse:" not in text and "\nelif " not in text
        runs = (self.main_block and not module) or not is_main
        if is_new and runs:
            self.taken[module].add(place)
            self.waiting.append((module, place))

    def _follow_uses(self, module: str, place: int) -> None:
        statement = self.sources[module].statements[place]
        for name in sorted(statement.imports):
            self._run_all(name)
        for parts in sorted(statement.uses):
            self._use(module, parts)
        for parts in sorted(statement.inner_uses):
            self.follow(parts)

    def _use(self, module: str, parts: Parts) -> None:
        """Take what a name stands for in a module."""
        source, name = self.sources[module], parts[0]
        for place in source.places.get(name, ()):
            self._include(module, place)
        if name in source.bound:
            target = source.bound[name]
            where, rest = self._place(target)
            self.stands_for[module, name] = ".".join((where, *rest) if where else rest)
            self.follow((*target, *parts[1:]))
        elif name not in source.places:
            if star := self._star_with(source, name):
                self.follow((*star.split("."), *parts))
            elif name in _EVERYTHING:
                self._include_all(module)

    def follow(self, parts: Parts) -> None:
        """Take what a dotted name stands for; of a module that is used as an object, all."""
        where, rest = self._place(parts)
        if not where or (rest and rest[0][:2] == "__"):
            return
        self._run_all(where)
        source = self.sources[where]
        if rest and rest[0] in source.places:
            self._use(where, rest)
        else:  # its own __getattr__ may make the name
            self._include_all(where)

    def _place(
        self, parts: Parts, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> tuple[str, Parts]:
        """Return the own module that a dotted name leads to, and what of it; else ("", parts)."""
        where = ""
        for place, name in enumerate(parts):
            rest = parts[place:]
            if where and (where, name) not in seen:
                source, now = self.sources[where], seen | {(where, name)}
                if name in source.places:
                    return where, rest
                if name in source.bound:
                    return self._place((*source.bound[name], *rest[1:]), now)
                if star := self._star_with(source, name):
                    return self._place((*star.split("."), *rest), now)
            inner = ".".join(parts[: place + 1])
            if self._load(inner) is not None:
                where = inner
            elif where:
                return where, rest
        return (where, ()) if where else ("", parts)

    def _star_with(self, source: ModuleText, name: str, seen: frozenset[str] = frozenset()) -> str:
        """Return the own module whose names are imported all, and that has this one; else ""."""
        for star in source.stars:
            module = self._load(star) if star not in seen else None
            if module is not None and (
                name in module.places
                or name in module.bound
                or self._star_with(module, name, seen | {star})
            ):
                return star
        return ""
