"""ElasticAgent with LocalWorkers fulfills the agent contract, with real processes."""

from __future__ import annotations

import os

import pytest

from elasticlib import ElasticAgent, LocalWorkers
from elasticlib.options import WorkerOptions
from elasticlib.testing import AgentContract, AgentRequest, RegroupContract
from elasticlib.testing.agent_job import MakeAgent


def make_elastic_agent(request: AgentRequest) -> ElasticAgent:
    workers = LocalWorkers(os.environ, options=WorkerOptions(start_method="spawn"))
    return ElasticAgent(request.spec, request.handler, workers, **request.settings)


class TestElasticAgent(AgentContract):
    @pytest.fixture
    def make_agent(self) -> MakeAgent:
        return make_elastic_agent


class TestWorkersThatRegroup(RegroupContract):
    @pytest.fixture
    def make_agent(self) -> MakeAgent:
        return make_elastic_agent
