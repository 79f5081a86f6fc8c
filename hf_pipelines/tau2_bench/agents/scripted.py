"""Baselines that print beside every report: what a benchmark pays for nothing, for giving up, for a blind plan."""

from hf_pipelines.tau2_bench.agents.phone_words import request
from hf_pipelines.tau2_bench.agents.script_player import Do, Say, Script, ScriptedAgent, hand_over
from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.modes import is_solo
from hf_pipelines.tau2_bench.players import Briefing
from hf_pipelines.tau2_bench.task import TRANSFER_TOOL

POLITE = "Thank you for calling. I am sorry about that, and I am glad to be of service."


class NoopAgent(ScriptedAgent):
    """Says something polite and does nothing."""

    def script(self, briefing: Briefing, opening: str) -> Script:
        """Politeness until the customer hangs up; alone, nothing at all."""
        while not is_solo(briefing.mode):
            yield Say(POLITE)


class TransferAgent(ScriptedAgent):
    """Hands every customer over at once."""

    def script(self, briefing: Briefing, opening: str) -> Script:
        """Hand over."""
        yield from hand_over("The customer needs help.", is_solo(briefing.mode))


class OracleScript(ScriptedAgent):
    """Goes through the gold steps once, without looking at what comes of them, and says what has to be said.

    Args:
        announce (`bool`, defaults to `True`): Whether it ends with a report that holds every string of
            `communicate_info`.
    """

    confused = False  # whether it calls the customer's tools itself

    def __init__(self, announce: bool = True) -> None:
        self.announce = announce

    def script(self, briefing: Briefing, opening: str) -> Script:
        """The gold plan, step by step."""
        solo, task = is_solo(briefing.mode), briefing.task
        domain = get_domain(task.domain_name, task.data_dir)
        own = domain.agent_toolkit.tools()
        for action in task.actions:
            if action.name == TRANSFER_TOOL:
                yield from hand_over(str(action.arguments.get("summary") or "A human has to help."), solo)
            elif solo or self.confused or action.requestor == "assistant":
                yield Do(action.name, action.arguments)
            else:
                yield Say(request(action.name, action.arguments))
        if solo:
            return
        writes = [action for action in task.actions if action.name in own and own[action.name].kind == "write"]
        if self.announce and (task.communicate_info or domain.user_toolkit is None or writes):
            facts = "; ".join(str(item) for item in task.communicate_info)
            yield Say("Everything on my side is done." + (f" For your information: {facts}." if facts else ""))


class RoleConfusedAgent(OracleScript):
    """Goes through the gold steps alone and calls the customer's tools itself, which is not possible in dual modes."""

    confused = True


__all__ = ["NoopAgent", "OracleScript", "RoleConfusedAgent", "TransferAgent"]
