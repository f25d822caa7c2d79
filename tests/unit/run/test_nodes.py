"""The nodes of a trainer: each has its share of the ranks, and nodes that cannot connect are reported."""

import pytest

from etude.errors import ConfigError
from etude.fleet.specs import GroupMember
from etude.run.ranks import Nodes


def test_each_node_has_its_share() -> None:
    ranks = Nodes(nnodes=2, node_rank=1, rdzv_endpoint="10.0.0.1:29400").environments(8)
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in ranks] == [("4", "0"), ("5", "1"), ("6", "2"), ("7", "3")]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in ranks} == {("8", "4")}
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in ranks} == {("10.0.0.1", "29400")}


@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        (Nodes(nnodes=3, rdzv_endpoint="a:1"), "--nnodes 3 does not divide"),
        (Nodes(nnodes=2), "needs --rdzv-endpoint HOST:PORT"),
        (Nodes(nnodes=2, node_rank=2, rdzv_endpoint="a:1"), "--node-rank from 0 to 1"),
    ],
)
def test_nodes_that_cannot_meet_are_told(nodes: Nodes, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        nodes.environments(8)


def test_a_member_of_a_group_knows_where_the_first_one_is() -> None:
    member = GroupMember(name="train", rank=1, size=2, port=29_400)
    assert member.rendezvous("10.0.0.1") == {
        "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "10.0.0.1:29400",
    }  # fmt: skip
    with pytest.raises(ValueError, match="rank 2 of the group 'train', which has 2 members"):
        GroupMember(name="train", rank=2, size=2, port=29_400)
