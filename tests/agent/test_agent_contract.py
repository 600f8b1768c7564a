"""Our own agent keeps the contract, with real processes."""

from __future__ import annotations

import os

import pytest

from elasticlib import ElasticAgent, LocalWorkers
from elasticlib.testing import AgentContract, AgentRequest
from elasticlib.testing.agent_job import MakeAgent


class TestElasticAgent(AgentContract):
    @pytest.fixture
    def make_agent(self) -> MakeAgent:
        def make(request: AgentRequest) -> ElasticAgent:
            workers = LocalWorkers(os.environ)
            return ElasticAgent(request.spec, request.handler, workers, **request.settings)

        return make
