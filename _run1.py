import sys, time
from tests.helpers.ranks import each_outcome
from tests.helpers.oracle import CaseCheck
from tests.helpers.oracle_grid import Case, sample
from tests.helpers import oracle
from deepspeed.utils import safe_get_full_fp32_param
import torch
class CC(CaseCheck):
    def __call__(self, rank):
        def compare(run, masters):
            d, m, worst = [], [], 0
            for name, p in run.engine.module.named_parameters():
                f = safe_get_full_fp32_param(p)
                d.append((f - masters[name].detach()).norm()); m.append((masters[name].detach() - run.initial[name]).norm())
            if rank.rank == 0: print("DRIFT", float(torch.stack(d).norm()/torch.stack(m).norm()), float(max(a/(b+1e-9) for a,b in zip(d,m))), flush=True)
            orig(run, masters)
        orig = oracle.Run.compare_masters
        oracle.Run.compare_masters = compare
        try: super().__call__(rank)
        finally: oracle.Run.compare_masters = orig
CaseCheck = CC
def run(size, cs):
    bad=0; t=time.time()
    for n,w in each_outcome(size,[(str(c),CaseCheck(c)) for c in cs]):
        bad += w is not None
        print("==",size, n, "ok" if w is None else "BAD "+w.replace("subnetwork_data_parallel","SDP")[-200:].replace("\n"," ")+" || ".join([l for l in w.split("\n") if "Error" in l or "helpers/oracle.py" in l and "in __call__" not in l and "in check_case" not in l][-4:]).replace("subnetwork_data_parallel","SDP")+w[-150:].replace("\n"," "), round(time.time()-t,1), flush=True); t=time.time()
    return bad
if __name__=="__main__":
    pats=[a for a in sys.argv[1:] if not a.isdigit()]; sizes=[int(a) for a in sys.argv[1:] if a.isdigit()] or [2,3,4]
    T=time.time(); bad=n_=0
    if pats and pats[0]=="L":
        cs=[eval("Case("+a+")") for a in pats[1:]]
    else:
        cs=[c for c in sample() if not pats or any(p in str(c) for p in pats)]
    for size in sizes:
        own=sorted((c for c in cs if c.ranks==size), key=lambda c:c.tensor_parallel)
        if own: bad+=run(size, own); n_+=len(own)
    print("bad", bad, "of", n_, round(time.time()-T,1))
