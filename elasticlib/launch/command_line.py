"""The argument parser of elasticrun, built from the table in `flags.py`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from .._version import __version__
from ..errors import did_you_mean
from .flags import FLAGS, GROUPS, UNSUPPORTED, Flag
from .layers import NOT_IMPLEMENTED

EXTENSION_MARK = "[+]"  # marks the options in --help that torchrun does not have

_EPILOG = """\
examples:
  elasticrun --standalone --nproc-per-node 2 train.py --epochs 3
  elasticrun --nnodes 1:4 --nproc-per-node 8 --rdzv-id job7 --rdzv-endpoint node0:29400 train.py
"""
_EXIT_CODES = """
exit codes:
  0 success, 1 failure, 2 invalid command line or configuration,
  69 unfit node (see --node-check), 75 drained (see --drain-exit-code),
  76 stopped by elasticlib stop,
  128 + N terminated by signal N
"""


def build_parser(*, all_options: bool = True) -> Parser:
    """Return elasticrun's parser.

    Args:
        all_options: show every option in the help text, and not only the common ones.
    """
    parser = Parser(
        prog="elasticrun",
        usage="elasticrun [options] training_script [options of the script]",
        description="Run a training script on each worker of an elastic job.\n\n"
        f"The options are torchrun's; {EXTENSION_MARK} marks those that torchrun does not have. "
        "Options that are\nnot given are read from PET_* environment variables: PET_MAX_RESTARTS=3 "
        "is the same as\n--max-restarts 3.",
        epilog=_EPILOG + _EXIT_CODES * all_options,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "training_script",
        help="a script, module (-m) or program (--no-python)"
        + "; a script must be a file, and not - (standard input), because each worker reads it"
        * all_options,
    )
    script_args = parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    script_args.required = False  # argparse would name it among the missing arguments
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag, all_options=all_options)
    _add_information(group, all_options=all_options)
    for dest, instead in UNSUPPORTED.items():
        spellings = dict.fromkeys((f"--{dest.replace('_', '-')}", f"--{dest}"))
        parser.add_argument(
            *spellings, action=_RejectTorchrunFlag, const=instead, help=argparse.SUPPRESS
        )
    return parser


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Return what the command line gives, without defaults.

    Raises:
        SystemExit: the command line requests help, or has a usage error.
    """
    return build_parser().parse_args(argv)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, *, all_options: bool) -> None:
    """Add a flag in its dash and underscore spellings.

    The namespace gets texts and no defaults, so that other layers of settings can give a value.
    """
    names = [name.rstrip(",") for name in flag.usage.split(" ") if name.startswith("-")]
    options: dict[str, Any] = {"action": "store_const", "const": "1"}
    if not flag.is_switch:
        options = {"choices": flag.choices, "metavar": flag.usage.rpartition(" ")[2]}
        options |= {"action": "append"} if flag.is_repeated else {}
    help_text = flag.help if flag.is_common else argparse.SUPPRESS
    if all_options:
        help_text = f"{flag.help}{flag.details}"
    group.add_argument(
        *dict.fromkeys([*names, f"--{flag.dest}"]),
        dest=flag.dest,
        default=argparse.SUPPRESS,
        help=help_text,
        **options,
    )


def _add_information(group: argparse._ArgumentGroup, *, all_options: bool) -> None:
    group.add_argument(
        "-h",
        "--help",
        action=_ShowCommonHelp,
        default=argparse.SUPPRESS,
        help="show the most used options and exit",
    )
    group.add_argument("--help-all", "--help_all", action="help", help="show all options and exit")
    version = f"elasticlib {__version__}"
    group.add_argument(
        "--version", action="version", version=version, help="print the version and exit"
    )
    group.add_argument(
        "--print-completion",
        "--print_completion",
        action=_PrintCompletion,
        metavar="SHELL",
        help="print a completion script for bash, zsh or tcsh (needs the package shtab) and exit"
        if all_options
        else argparse.SUPPRESS,
    )


class _ShowCommonHelp(argparse.Action):
    """Shows the help text of the common options."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        build_parser(all_options=False).print_help()
        parser.exit()


class _RejectTorchrunFlag(argparse.Action):
    """Rejects a flag of torchrun that elasticlib lacks; `const` names the replacement."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, _value: object, flag: str | None = None
    ) -> None:
        parser.error(f"{flag}: {NOT_IMPLEMENTED}; {self.const}")


class _PrintCompletion(argparse.Action):
    """Prints a completion script, as torchrun does. Only this option needs the package shtab."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, shell: Any, flag: str | None = None
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(1, f"elasticrun: {flag} needs the package shtab: pip install shtab\n")
        if shell not in shtab.SUPPORTED_SHELLS:
            shells = ", ".join(shtab.SUPPORTED_SHELLS)
            parser.error(f"{flag} must be one of {shells}, got {shell!r}")
        print(shtab.complete(parser, shell=shell))
        parser.exit()


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows each option in its dash spelling only, with the default of its field."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        flag = FLAGS.get(action.dest)
        if flag is None:
            return action.help
        # Imported here, because only the help text needs attrs.
        from .option_text import default_text

        default = default_text(flag).replace("%", "%%")
        parts = (
            action.help,
            f"(default: {default})" if default else "",
            EXTENSION_MARK if flag.is_extension else "",
        )
        return " ".join(filter(None, parts))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return action.dest
        if action.dest in FLAGS:
            return FLAGS[action.dest].usage
        spellings = super()._format_action_invocation(action).split(", ")
        return ", ".join(text for text in spellings if "_" not in text)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors suggest the option or command that was probably meant."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(
            r"unrecognized arguments:.*?(-[\w-]+)|invalid choice: '([^']+)'", message
        )
        if unknown is not None:
            choices = re.findall(r"[\w-]+", message.partition("choose from")[2])
            name = (unknown[1] or unknown[2]).replace("_", "-")
            message += did_you_mean(name, choices or self._names()) or self._hint(message)
        super().error(message)

    def _hint(self, message: str) -> str:
        takes_script = any(action.dest == "training_script" for action in self._actions)
        if takes_script and message.startswith("unrecognized"):
            return " (options of the training script go after the script name)"
        return ""

    def _names(self) -> Iterator[str]:
        """Yield the long options and the commands of this parser, and those of its commands."""
        for action in self._actions:
            if isinstance(action, _RejectTorchrunFlag):
                continue
            yield from (name for name in action.option_strings if re.match("--[^_]+$", name))
            if isinstance(action, argparse._SubParsersAction):
                for name, parser in action.choices.items():
                    yield from (name, *parser._names())
