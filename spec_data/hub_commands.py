"""The commands `spec-data push` and `spec-data pull`. Heavy imports wait until one runs."""

import argparse

from spec_data.options.hub_options import PullConfig, PushConfig
from spec_data.terminal.config import resolve
from spec_data.terminal.console import say_next

_PUSH = """\
Upload a sealed dataset to the Hugging Face Hub, with a card, and with the documents without
states for the Hub's viewer. Run the same command again to resume."""
_PULL = """\
Download a dataset that `push` uploaded, and check every shard. Run the same command again to
resume."""

HUB_COMMANDS = (
    (
        "push",
        PushConfig,
        "DIR REPO [--private] [--layers IDS]",
        "upload a dataset to the Hub",
        _PUSH,
        "",
    ),
    (
        "pull",
        PullConfig,
        "REPO DIR [--revision REV] [--layers IDS]",
        "download one from the Hub",
        _PULL,
        "",
    ),
)
"""Name, options, usage, short help, description and epilog of each command."""

_BARE = {"push": ("repo",), "pull": ("repo", "out")}  # options that may be given without their flag


def add_bare_words(parser: argparse.ArgumentParser, command: str) -> None:
    """Let a command take options as bare words, after those that it takes already."""
    for name in _BARE.get(command, ()):
        shown = {"repo": "REPO", "out": "DIR"}[name]
        text = f"same as --{name} {shown}"
        parser.add_argument(f"bare_{name}", nargs="?", metavar=shown, help=text)


def take_bare_words(args: argparse.Namespace) -> None:
    """Set the options that were given as bare words."""
    for name in _BARE.get(args.command, ()):
        given = getattr(args, f"bare_{name}")
        if given is not None:
            setattr(args, name, given)


def _push(args: argparse.Namespace) -> int:
    """Run `push` and return its exit code."""
    config = resolve(PushConfig, args)
    from spec_data.hub.push import push

    print(push(config))
    if not config.dry_run:
        say_next("spec-data", "pull", config.repo, "DIR")
    return 0


def _pull(args: argparse.Namespace) -> int:
    """Run `pull` and return its exit code."""
    config = resolve(PullConfig, args)
    from spec_data.hub.pull import pull

    print(pull(config))
    if not config.dry_run:
        say_next("spec-data", "verify", config.out)
    return 0


HUB_FUNCTIONS = {"push": _push, "pull": _pull}
"""What each command calls."""
