"""Settings from flags, environment and YAML: one definition, a pydantic model, for all three.

`parse_settings(EngineConfig, argv, prog=..., description=...)` gives the model's fields kebab-case
flags, reads `PAGEWIRE_<FIELD>` from the environment (empty is unset, but of keys and certificates
it is refused: see `Guard`) and a YAML file named by `--config`, and lets the nearest win: flags,
then environment, then YAML, then defaults. What is wrong is told in one line that names the flag,
variable or key at fault, and the process exits with status 2. A variable `PAGEWIRE_...` that no
program knows is warned of: several programs, of several versions, may share an environment.

argparse and not pydantic-settings' own command line, whose errors name neither the source of a bad
value nor the nearest known flag.
"""

from __future__ import annotations

import argparse
import collections.abc
import os
import shutil
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ByteSize, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from pagewire import __version__
from pagewire.errors import ErrorCode, PagewireError
from pagewire.setting_checks import Guard
from pagewire.variables import (
    CONFIG_VARIABLE,
    ENVIRONMENT_PREFIX,
    nearest,
    unknown_variables,
    variable_name,
    warnings_about,
)

# Exit statuses. Who has made a mistake must correct it: to start the program again is of no use.
FAILURE, MISTAKE = 1, 2
# What the errors at a start say that is of the model or the machine that a setting names.
_CODES_OF_MISTAKES = frozenset(
    (
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.NOT_FOUND,
        ErrorCode.FAILED_PRECONDITION,
        ErrorCode.UNIMPLEMENTED,
    )
)

ModelT = TypeVar("ModelT", bound=BaseModel)


class SettingsError(Exception):
    """A setting is unknown or has a value that can't be used; the text names it and the remedy.

    Attributes:
        status: what a program ends with of which this is the end.
    """

    status = MISTAKE


class UnmetSettingError(SettingsError):
    """What a setting asks for is not there now: a port that is free, a package. It may be later."""

    status = FAILURE


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """A heading of the help text and the fields beneath it."""

    title: str
    fields: tuple[str, ...]


def parse_settings(
    config_class: type[ModelT],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    positional: Sequence[str] = (),
    groups: Sequence[FlagGroup] = (),
    environ: Mapping[str, str] | None = None,
) -> ModelT:
    """Reads a program's settings, or prints what is wrong and exits.

    Args:
        config_class: the pydantic model that defines the settings.
        argv: arguments without the program's name; None: those of this process.
        prog: the program's name, for help and errors.
        description: what the program does, for the head of `--help`.
        positional: fields that may also be given without a flag, in this order.
        groups: headings for the help text; fields in none of them come first.
        environ: the environment; None: this process's.

    Returns:
        The validated settings; `model_fields_set` holds what was given anywhere.

    Raises:
        SystemExit: 0 after `--help` and `--version`, 2 for a setting that can't be used.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(
        config_class, prog=prog, description=description, positional=positional, groups=groups
    )
    environ = os.environ if environ is None else environ
    try:
        settings = load_settings(config_class, parser, arguments, environ, positional)
    except SettingsError as error:
        exit_with_error(prog, str(error))
    finally:
        # Before an error too: it may be why a setting is said to be missing.
        for line in warnings_about(unknown_variables(environ), config_class.model_fields):
            print(f"{prog}: warning: {line}", file=sys.stderr)
    return settings


def exit_with_error(prog: str, message: str, status: int = MISTAKE) -> NoReturn:
    """Prints `prog: error: message` to standard error and exits."""
    for line in message.splitlines():
        print(f"{prog}: error: {line}", file=sys.stderr)
    if status == MISTAKE:
        print(f"Try `{prog} --help`.", file=sys.stderr)
    raise SystemExit(status)


def describe_failure(error: Exception, config_class: type[BaseModel]) -> str:
    """What a program that can't start says: the flag at fault, where one is, and the message."""
    if isinstance(error, PagewireError) and error.field in config_class.model_fields:
        return f"{flag_name(error.field)}: {error.message}"
    return str(error)


def describe_invalid(error: ValidationError, config_class: type[BaseModel]) -> str:
    """What is wrong with settings that were given to one of several programs' parts, in a line for
    each, named by its flag."""
    return _describe(error, config_class, {})


def failure_status(error: Exception, config_class: type[BaseModel]) -> int:
    """The exit status of a program that can't start: MISTAKE where one of its settings is at fault,
    by itself or in what it names, else FAILURE."""
    if isinstance(error, SettingsError):
        return error.status
    if isinstance(error, PagewireError) and error.field in config_class.model_fields:
        return MISTAKE if error.code in _CODES_OF_MISTAKES else FAILURE
    return FAILURE


def flag_name(field: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field.replace("_", "-")


def settings_to_argv(config: BaseModel) -> list[str]:
    """The flags that give another process these settings; what was never set is left out.

    Secrets are left out too, for every user of the machine can read a command line: see
    `secrets_to_environment`.
    """
    arguments: list[str] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if name not in config.model_fields_set or value is None or _is_secret(field):
            continue
        if _is_bool(field):
            arguments.append(flag_name(name) if value else "--no-" + flag_name(name)[2:])
        elif isinstance(value, (list, tuple, set, frozenset)):
            arguments.extend(f"{flag_name(name)}={item}" for item in value)
        else:
            arguments.append(f"{flag_name(name)}={value}")
    return arguments


def secrets_to_environment(config: BaseModel) -> dict[str, str]:
    """The variables that give another process the secrets among these settings."""
    return {
        variable_name(name): getattr(config, name).get_secret_value()
        for name, field in type(config).model_fields.items()
        if _is_secret(field) and getattr(config, name) is not None
    }


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(100, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=34, width=width)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flag, _, explicit = message.removeprefix("argument ").partition(
            ": ignored explicit argument "
        )
        text = f"{flag.split('/')[0]} takes no value, not {explicit}" if explicit else flag
        raise SettingsError(text)


def build_parser(
    config_class: type[BaseModel],
    *,
    prog: str,
    description: str,
    positional: Sequence[str] = (),
    groups: Sequence[FlagGroup] = (),
) -> argparse.ArgumentParser:
    """The argparse parser of a model's fields. Values stay text: pydantic checks them."""
    parser = _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
        usage=" ".join([prog, "[flags]", *(f"[{name.upper()}]" for name in positional)]),
        epilog=f"Each flag is also an environment variable ({ENVIRONMENT_PREFIX} and the flag's "
        "name in capitals with underscores) and a key of the YAML file. Flags win over the "
        "environment, and the environment over the file.",
    )
    parser.add_argument("--version", action="version", version=f"pagewire {__version__}")
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help=f"Read settings from this file; also {CONFIG_VARIABLE}.",
    )
    headings: dict[str, Any] = {}
    for group in groups:
        section = parser.add_argument_group(group.title)
        headings |= dict.fromkeys(group.fields, section)
    for name, field in config_class.model_fields.items():
        _add_flag(headings.get(name, parser), name, field)
    for name in positional:
        parser.add_argument(
            f"positional:{name}",
            metavar=name.upper(),
            nargs="?",
            default=argparse.SUPPRESS,
            help=f"The same as {flag_name(name)}.",
        )
    return parser


def _add_flag(parser: Any, name: str, field: FieldInfo) -> None:
    options: dict[str, Any] = {
        "dest": name,
        "default": argparse.SUPPRESS,
        "help": _help_text(field).replace("%", "%%"),
    }
    if _is_bool(field):
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = _metavar(field)
        if _is_list(field):
            options["action"] = "append"
    parser.add_argument(flag_name(name), **options)


def load_settings(
    config_class: type[ModelT],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    positional: Sequence[str] = (),
) -> ModelT:
    """`parse_settings` without the exit.

    Raises:
        SettingsError: with one line for each thing that is wrong.
    """
    flags = _read_flags(parser, arguments, positional)
    config_path = flags.pop("config", None) or environ.get(CONFIG_VARIABLE)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if config_path:
        for name, (key, value) in _read_yaml(config_class, Path(config_path)).items():
            values[name], sources[name] = value, f"`{key}` in {config_path}"
    for name, field in config_class.model_fields.items():
        if text := environ.get(variable_name(name), ""):
            values[name] = text.split(",") if _is_list(field) else text
            sources[name] = variable_name(name)
        elif variable_name(name) in environ and name not in flags and _is_guard(field):
            raise SettingsError(
                f"{variable_name(name)}: is set, but empty; unset it to do without, or give it a "
                "value"
            )
    for name, value in flags.items():
        values[name], sources[name] = value, flag_name(name)
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_describe(error, config_class, sources)) from None


def _read_flags(
    parser: argparse.ArgumentParser, arguments: Sequence[str], positional: Sequence[str]
) -> dict[str, Any]:
    known = [option for action in parser._actions for option in action.option_strings]
    namespace, unknown = parser.parse_known_args([_with_unit(each, known) for each in arguments])
    flags = vars(namespace)
    if unknown:
        first = unknown[0].split("=", 1)[0]
        if first.startswith("-"):
            raise SettingsError(f"there is no flag {first}{nearest(first, known)}")
        raise SettingsError(f"{first!r} belongs to no flag")
    for name in positional:
        value = flags.pop(f"positional:{name}", None)
        if value is None:
            continue
        if name in flags:
            raise SettingsError(f"{name.upper()} and {flag_name(name)} are the same: give one")
        flags[name] = value
    return flags


def _with_unit(argument: str, known: Sequence[str]) -> str:
    """The argument, with the unit of a flag that was given without: --grace-period."""
    flag, equals, value = argument.partition("=")
    in_seconds = f"{flag}-s"
    is_short = flag.startswith("--") and flag not in known and in_seconds in known
    return f"{in_seconds}{equals}{value}" if is_short else argument


def _read_yaml(config_class: type[BaseModel], path: Path) -> dict[str, tuple[str, Any]]:
    """The file's settings by field: the key as it is written there, and the value."""
    import yaml  # only where a file is given: it would slow every other start

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config: can't read {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(
            f"--config: {path} is not valid YAML{where}: {error.problem or error.context}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(f"--config: {path} is not valid YAML: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"--config: {path} must hold `setting: value` lines")
    values: dict[str, tuple[str, Any]] = {}
    known = [flag_name(name)[2:] for name in config_class.model_fields]
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in config_class.model_fields:
            hint = nearest(name.replace("_", "-"), known)
            raise SettingsError(f"{path} has an unknown setting `{key}`{hint}")
        if name in values:
            raise SettingsError(f"{path} has the setting `{key}` twice")
        values[name] = str(key), value
    return values


def _describe(
    error: ValidationError, config_class: type[BaseModel], sources: Mapping[str, str]
) -> str:
    lines: dict[str, str] = {}
    for detail in error.errors():
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if name in lines:
            continue  # the other arms of a union say no more
        if detail["type"] == "missing":
            lines[name] = f"{flag_name(name)} is required (or {variable_name(name)})"
            continue
        message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        # "Input should be a valid integer, unable to parse string as an integer"
        message = message.partition(", unable to parse ")[0]
        source = sources.get(name) or (flag_name(name) if name else "")
        field = config_class.model_fields.get(name)
        if name in sources and field is not None and not _is_secret(field):
            message = f"{message[:1].lower()}{message[1:]}, not {detail['input']!r}"
        lines[name] = f"{source}: {message}" if source else message
        if str(detail["input"]).startswith("tcp://"):
            lines[name] += (
                "; Kubernetes sets this variable for a Service called pagewire: "
                "give the pod `enableServiceLinks: false`"
            )
    return "\n".join(lines.values())


def _arms(field: FieldInfo) -> list[Any]:
    """The types a field takes, None left out."""
    annotation = field.annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [arm for arm in typing.get_args(annotation) if arm is not type(None)]
    return [annotation]


def _is_bool(field: FieldInfo) -> bool:
    return _arms(field) == [bool]


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in _arms(field)


def _is_guard(field: FieldInfo) -> bool:
    return _is_secret(field) or any(isinstance(mark, Guard) for mark in field.metadata)


def _is_list(field: FieldInfo) -> bool:
    sequences = (list, tuple, set, frozenset, collections.abc.Sequence)
    return any((typing.get_origin(arm) or arm) in sequences for arm in _arms(field))


def _metavar(field: FieldInfo) -> str:
    arms = _arms(field)
    if len(arms) == 1 and typing.get_origin(arms[0]) is Literal:
        return "{" + ",".join(str(choice) for choice in typing.get_args(arms[0])) + "}"
    if arms == [ByteSize]:
        return "SIZE"
    if all(isinstance(arm, type) and issubclass(arm, int) for arm in arms):
        return "N"
    if all(isinstance(arm, type) and issubclass(arm, (int, float)) for arm in arms):
        return "X"
    if any(isinstance(arm, type) and issubclass(arm, Path) for arm in arms):
        return "PATH"
    return "TEXT"


def _help_text(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required():
        return f"{text} Required."
    default = field.get_default(call_default_factory=True)
    if default is None or default in ((), []) or default == "" or "Default:" in text:
        return text
    if _is_bool(field):
        default = "on" if default else "off"
    if isinstance(default, (tuple, list)):
        default = ", ".join(map(str, default))
    return f"{text} Default: {default}."
