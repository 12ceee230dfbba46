#!/usr/bin/env python3
"""Third model: one log per daemon (docs/design/0011-one-log-per-daemon.md, rules L1 to L13). Explicit states, breadth first, safety only.

Modelled: shard manifests as on the page (epoch, ranges, checkpoint, previous; a CAS is one atomic step on the tip), logs of slots
OPEN / DATA / FENCE with sections and heads. A slot is frozen, its PUT lands at any later time (also a second copy, a hedge or a retry,
that may create again what was emptied), and its owner learns of it later still, or never. A manifest operation (claim, reclaim,
checkpoint, release, giving back) is frozen with its own `from`, k and content and lands at any later time, also after its daemon was fenced.
A candidate lists, pauses, walks up, fences; claims each shard alone; replays; serves. Truncation: a bound is planned at one time,
slots go one by one later, also when the owner has long been fenced. Collector: sees a fence, reads the tips one after the other, deletes.

Sound reductions: (1) no crash step: a crashed daemon is one that takes no more steps; what it had under way still lands. (2) an
operation on a manifest lands and is learned in one step: what knowing it allows is optional. (3) a claim may land on any tip of the
epoch it was frozen for (more than the commit primitive allows). (4) staging is freezing: a shard that is stopped earlier just stages nothing.
(5) a bound is planned on all tips at once (a `from` never falls); the collector deletes all DATA of a dead log at once.
(6) a fenced daemon that comes back is another daemon with another log. CLOSE is a FENCE by the owner: not apart. A `from` moved without an object is a checkpoint with the same content.
(7) checks are made in every state, from `checkpoint` and from `previous`: so a checkpoint may be found damaged at any time.
Damage (L13, runs `end` to `untold`): a slot at the end or in the middle can never be read again; slots at the end are gone, of which the
heartbeat has told exactly, late or not at all. The operator's command reads, then writes slot by slot, and may end between two; a fence may come
between them; seals and checkpoints of the former owner land before, between and after. Checked then, too: what was answered outside the slots that
are given up is found, or its shard is refused by name; what is answered later is found; where nothing but the end is damaged nothing is refused
and no shard slot is used twice; a shard of which no section is damaged is never refused. Where slots are lost, and not only damaged, the owner has
ended (what it has under way may land): one that lives may be beyond every fence. No slot is lost between a fencer's list and its fence.
Not modelled: topic manifests (protocol_model_shard.py; with damage one topic a shard, its seals and its claim), time (30 s, 15 s), the local directory's record log, lost answers of
a CAS (protocol_model.py), several operations on one shard's manifest under way from one daemon (the commit primitive forbids it).

Checked in every state: everything acknowledged is found from `checkpoint` and from `previous` through the ranges of the tip, k dense, none twice;
a serving owner whose epoch is the tip's knows everything acknowledged; an owner whose next number is absent with no slot under way (a
probe) still owns all it thinks; a retry sent after the loss confirms nothing; of one log at most one FENCE can be claimed with.
In the correct runs also the two lemmas that L5 leans on: a fence that can be claimed with is the highest slot of its log; a planned bound is
above no `from` of that log. The page lets an owner plan its bound from its own memory; the model lets it read the tips, which allows more.
Usage: protocol_model_log.py [correct] [mutants] [run | run:bug,bug ...]     e.g. tiny:other_epoch; all correct runs: 30 minutes, all bugs: 3.
`no_probe` as a second bug takes the checks of confirmations away, so that a trace goes on to a loss. `wide` and `wide1` are random walks.
"""
import random, struct, sys, time
from collections import deque, namedtuple as nt
FS = frozenset
D = nt('D', 'alive nxt pend late hd own ops cand bound bud seal', defaults=(None,))    # daemon i writes log i; nxt - 1 is its last certain slot
B = nt('B', 'adds tries claims cks rels recl plans dup seals', defaults=(0,))  # what it may still do
PUT = nt('PUT', 'secs heads fly sent made sup')                         # slot nxt under way: copies in flight, sent, creations; lost when last sent
OWN = nt('OWN', 'e k mem st')                                           # st 0 claimed, 1 serves, 2 stopped, 3 being given back, 4 lost to another while it was claimed anew
OP = nt('OP', 'kind e frm k mem fence')                                 # under way on a manifest; frm = last certain slot at freezing
TIP = nt('TIP', 'epoch ranges ck prev')                                 # ck, prev = (k, records)
RNG = nt('RNG', 'log epoch frm to first last')
M, R, NS, ND = FS(), None, 2, 3                                         # planted bugs, run, shards, daemons
W = nt('W', 'hits gives gone done told left tops')                      # damage: budgets, (log, slot) that nobody can read, those given up, what heartbeats tell, what is still to be written, topics
TOP = nt('TOP', 'epoch applied recs')                                   # of each shard one topic: sealed as of shard slot `applied`
class Violation(Exception): pass
class Named(Exception): pass                                            # damage that is found, and told: the shard is refused
DATA = ('D', 'G', 'XD', 'XG')                                           # G: sections without a record, in place of what is given up; X: it cannot be read

def rep(t, i, v): return t[:i] + (v,) + t[i + 1:]
def opened(tip): return tip.ranges[-1] if tip.ranges and tip.ranges[-1].to is None else None
def froms(tip, l): return [r.frm for r in tip.ranges if r.log == l]
def has(put, s): return put is not None and any(x[0] == s for x in put.secs)
def insert(log, n, slot): return tuple(sorted(log + ((n, slot),)))

def unended(l, L, w):
    """nobody can fence log l: its highest slot cannot be read, or is below what the heartbeat of its daemon tells"""
    m, (kind, secs, heads) = L[l][-1]
    return kind[0] == 'X' or (kind != 'F' and m < w.told[l])

def recover(s, tip, L, start, w):
    """what a replay of s from `start` reads: (records, last k)"""
    hurt = lambda text: (Named if w.gone else Violation)(text)
    c, recs = start; top = w.tops[s]; got = set(recs | top.recs); ks = {}; last = c
    for r in tip.ranges:
        log = L[r.log]; last = max(last, r.first - 1)
        if ks and max(ks) >= r.first: raise hurt('shard %d: k %d lies before a range whose first_slot is %d' % (s, max(ks), r.first))
        if not log: raise Violation('log %d, named for shard %d, is empty' % (r.log, s))
        if r.to is None:                                                # the end of a living log, or the heads of its fence
            h = ([x[2][s] for n, x in log if x[0][0] != 'X'] or [None])[-1]
            if h and h[0] == r.epoch: last = max(last, h[1])
        else: last = max(last, r.last)
        for n, (kind, secs, heads) in log:
            if kind in ('D', 'G') and n > r.frm and (r.to is None or n <= r.to):
                for s2, e2, k in secs:
                    if s2 == s and k > c and (e2 == r.epoch or 'any_epoch' in M) and k >= r.first and (r.last is None or k <= r.last):
                        if k in ks: raise hurt('shard %d k %d twice: %s and log %d slot %d' % (s, k, ks[k], r.log, n))
                        ks[k] = (r.log, n)
                        if kind == 'D' and k > top.applied: got.add((r.log, n, s, e2, k))               # the topic passes over what it was sealed as of
    for k in range(c + 1, last + 1):
        if k not in ks: raise hurt('hole: shard %d k %d (from %d to %d)' % (s, k, c + 1, last))
    return FS(got), max([last] + list(ks))

def claimed(s, tip, i, op, L):
    """L5: the tip after the claim, None: refused"""
    if tip.epoch != op.e - 1: return None
    rng = list(tip.ranges); r = opened(tip)
    if r is None: last = rng[-1].last if rng and 'gb_first' not in M else tip.ck[0]                 # (a)
    elif op.kind == 'rc':                                                                           # (c)
        if r.log != i: return None
        last = op.k
        if op.fence: rng[-1] = r._replace(to=op.frm, last=last)          # here: own heads have a section of that epoch
        else: rng.pop()
    else:                                                                                           # (b)
        if op.fence is None: return None
        l, f, heads = op.fence
        if 'epoch_only' not in M and (r.log != l or ('no_from' not in M and min(froms(tip, l)) >= f)): return None
        h = heads[s]
        if 'no_heads' in M:
            d = dict(L[r.log]); gone = [n for n in range(r.frm + 1, f) if n not in d]
            if gone: raise Violation('slot %d of log %d named for shard %d is gone: false damage' % (gone[0], r.log, s))
            h = (r.epoch, max([r.first - 1] + [x[2] for n in range(r.frm + 1, f) for x in d[n][1] if x[:2] == (s, r.epoch)]))
        if h and (h[0] == r.epoch or 'heads_no_epoch' in M): last = h[1]; rng[-1] = r._replace(to=f - 1, last=last)
        else: last = tip.ck[0] if 'first_slot' in M else r.first - 1; rng.pop()
    if 'ck_below' not in M: last = max(last, tip.ck[0])                 # more only where slots are lost of which nobody knew
    covered = tip.ck[0] if 'claim_drop_ck' in M else tip.prev[0]
    rng = [x for x in rng if x.last is None or x.last > covered]
    rng.append(RNG(i, op.e, op.frm, None, last + 1, None))
    return tip._replace(epoch=op.e, ranges=tuple(rng))

def checkpointed(s, tip, op, L):
    """L7: drop ranges, raise `from` of the first that is left"""
    prev = tip.ck[0]; c = op.k if 'drop_ck' in M else prev
    rng = [r for r in tip.ranges if r.last is None or r.last > c]
    if rng:
        r = rng[0]; c = op.k if 'raise_ck' in M else prev
        at = [n for n, (kind, secs, h) in L[r.log] if n > r.frm and (s, r.epoch, c + 1) in secs and (r.to is not None or n <= op.frm)]
        if at: r = r._replace(frm=max(r.frm, at[0] - 1))
        elif r.to is None: r = r._replace(frm=max(r.frm, op.frm))
        if r.to is None and op.k == c and 'raise_staged' in M: r = r._replace(frm=op.frm + 1)
        if r.to is None and 'idle_ck' in M and op.k > prev and not [1 for n, x in L[r.log] if (s, r.epoch, op.k + 1) in x[1]]: r = r._replace(frm=max(r.frm, op.frm))
        rng[0] = r
    return TIP(tip.epoch, tuple(rng), (op.k, op.mem), tip.ck)

def landed(s, tip, i, op, L):
    if op.kind in ('cl', 'rc'): return claimed(s, tip, i, op, L)
    r = opened(tip)
    if tip.epoch != op.e and 'ck_any_epoch' in M and op.kind == 'ck' and r: return tip._replace(ck=(op.k, op.mem), prev=tip.ck)
    if tip.epoch != op.e or r is None or r.log != i: return None
    if op.kind == 'ck': return checkpointed(s, tip, op, L)
    if op.kind == 'gb': return tip._replace(ranges=tip.ranges[:-1])                                 # L8, give back
    if 'fast_release' in M: return tip._replace(ranges=tip.ranges[:-1] + ((r._replace(to=op.frm, last=op.k),) if op.k >= r.first else ()))
    return TIP(tip.epoch, (), (op.k, op.mem), tip.ck if 'release_once' in M else (op.k, op.mem))

def bound_of(i, p, SM, L):
    """L7: up to where the owner may delete"""
    b = [p.nxt - 1 if 'bound_high' in M else p.nxt - 2]
    for s in range(NS):
        op, own = p.ops[s], p.own[s]
        if 'bound_owned' in M and not own: pass
        elif 'other_epoch' in M and not (own and own.e == SM[s].epoch): pass                         
        elif 'bound_open' in M: b += [opened(SM[s]).frm] if opened(SM[s]) and opened(SM[s]).log == i else []
        elif 'bound_prev' in M:
            for r in SM[s].ranges:
                if r.log == i: b.append(min([n - 1 for n, x in L[i] if any(y[0] == s and y[2] > SM[s].ck[0] for y in x[1])] + [p.nxt - 1]))
        elif own is None and opened(SM[s]) is None: pass                # released or given back, for certain
        else: b += froms(SM[s], i)
        if op and op.kind in ('cl', 'rc') and 'bound_claims' not in M: b.append(op.frm)
    return min(b)

def lost(i, p, log):
    keep = p.pend if p.pend and p.pend.fly and p.nxt not in dict(log) else None
    return D(False, p.nxt, keep, p.late, None, (None,) * NS, p.ops, None, None, None, p.seal)

def hits(SM, L, PR, w):
    """damage: a slot that nobody can read any more; slots that are gone, of which the heartbeat has told (exactly, late, or not at all)"""
    for l in range(ND):
        log = L[l]
        for n, (kind, secs, heads) in log if 'damage' in R['hit'] else ():
            if kind[0] != 'X' and (R['mid'] or n == max(m for m, x in log if x[0][0] != 'X')):
                yield ('slot %d of log %d is damaged', n, l), ((l, rep(log, [m for m, x in log].index(n), (n, ('X' + kind, secs, heads)))),), w._replace(hits=w.hits - 1, gone=w.gone | {(l, n)})
        for many in (1, 2) if {'told', 'late', 'untold'} & set(R['hit']) else ():
            cut = log[-many:]
            if len(cut) < len(log) and all(x[0] == 'D' and n < PR[l].nxt for n, x in cut):
                gone = {(l, n) for n, x in cut}
                for told, how in ((cut[-1][0], 'told'), (cut[0][0], 'late'), (0, 'untold')):
                    if how in R['hit'] and (how, many) != ('late', 1) and not (PR[l].alive and how != 'told') and not any(q.cand and q.cand[0] == l and not q.cand[3] for q in PR):    # no rule helps where an owner lives and nobody knows, or where slots are lost between a fencer's list and its fence
                        yield ('%d slots at the end of log %d are lost, %s', many, l, how), ((l, log[:-many]),), w._replace(hits=w.hits - 1, gone=w.gone | gone, told=rep(w.told, l, max(told, w.told[l])), done=w.done | {x for x in gone if x[1] > told})

def given_up(l, SM, L, w):
    """L13: (the first and the last slot that are given up, what is written in their place); None: the log can be fenced as it is"""
    log = L[l]; top = log[-1][0]; new = [(n, x) for n, x in log if x[0][0] != 'X'][-1:]
    owned = [s for s in range(NS) if opened(SM[s]) and opened(SM[s]).log == l]
    if not owned or (new and (new[0][0] == top or 'end_below' in M) and new[0][1][0] == 'F'): return None
    r = new[0][0] - (new[0][1][0] == 'F' and 'fence_counts' not in M) if new else min(opened(SM[s]).frm for s in owned)               # a false fence repeats the heads of the slot before
    heads = new[0][1][2] if new else (None,) * NS; m = max(top, w.told[l]); need = {}
    if 'page_fence' in M: return (r + 1, m), ((m + 1, ('F', (), heads)),) if unended(l, L, w) else ()
    for s in owned:
        g = opened(SM[s])
        if not heads[s] or heads[s][0] != g.epoch: heads = rep(heads, s, (g.epoch, g.first - 1 if new else max(g.first - 1, SM[s].ck[0])))
        missing = 1 if 'give_one' in M and m > r else max(m - r, not new)
        need[s] = max(missing, 0 if 'no_known' in M else max(SM[s].ck[0], w.tops[s].applied) - heads[s][1], 0)
    made = []
    for j in range(max(need.values())):
        secs = tuple((s, heads[s][0], heads[s][1] + 1) for s in owned if j < need[s])
        for s, e, k in secs: heads = rep(heads, s, (e, k))
        made.append((top + 1 + j, ('G', secs, heads)))
    return ((r + 1, m), tuple(made)) if made else None

def operator(SM, L, PR, w, iL, iW):
    """the operator's command: it looks, and writes one slot after the other; it may end at any time, and be given again"""
    if w.gives:
        for l in range(ND):
            if not L[l] or ((w.told[l] > L[l][-1][0]) and PR[l].alive): continue                           # who is told of lost slots ends the daemon first
            found = given_up(l, SM, L, w)
            if found is None:
                if any(opened(t) and opened(t).log == l for t in SM) and unended(l, L, w): raise Violation('log %d cannot be fenced, and there is nothing to give up' % l)
                continue
            (a, z), made = found
            if made: yield ('the operator gives up slots %d to %d of log %d', a, z, l), ((iW, w._replace(gives=w.gives - 1, left=(l, (a, z), made))),)
    if w.left:
        l, (a, z), made = w.left; log = L[l]
        if R['atomic']: now, rest = made, ()
        else: now, rest = made[:1], made[1:]
        if now[0][0] in dict(log): yield ('the operator finds slot %d of log %d', now[0][0], l), ((iW, w._replace(left=None)),)
        else:
            for n, slot in now: log = insert(log, n, slot)
            yield ('the operator writes slot %d of log %d', now[0][0], l), ((iL + l, log), (iW, w._replace(left=(l, (a, z), rest) if rest else None, done=w.done | {x for x in w.gone if x[0] == l and a <= x[1] <= z})))

def succs(S):
    SM, L, acked, PR, w, gc = S[:NS], S[NS:NS + ND], S[NS + ND], S[NS + ND + 1:-2], S[-2], S[-1]
    iL, iA, iP, iW, iG = NS, NS + ND, NS + ND + 1, len(S) - 2, len(S) - 1
    if w.hits:
        for lab, ch, w2 in hits(SM, L, PR, w): yield lab, tuple((iL + l, log) for l, log in ch) + ((iW, w2),)
    if R['hit']:                                                        # L13
        yield from operator(SM, L, PR, w, iL, iW)
    for i in range(ND):
        p = PR[i]; log = L[i]; d = dict(log); n = p.nxt; put = p.pend
        me = iP + i
        if put and put.fly and n not in d:                              # a copy of the slot lands (one that finds it occupied changes nothing)
            q = put._replace(fly=put.fly - 1, made=min(2, put.made + 1))
            yield ('p%d slot %d lands %s', i, n, put.secs), ((iL + i, insert(log, n, ('D', put.secs, put.heads))), (me, p._replace(pend=q if p.alive or q.fly else None)))
        if p.late and p.late[0] not in d:
            n2, slot = p.late; ch = ((iL + i, insert(log, n2, slot)), (me, p._replace(late=None)))
            if 'two_puts' in M and p.alive: ch += ((iA, acked | {(i, n2) + x for x in slot[1]}),)
            yield ('p%d late copy of slot %d lands', i, n2), ch
        for s in range(NS):                                             # an operation on a manifest lands, or is refused
            op = p.ops[s]
            if op is None: continue
            tip = landed(s, SM[s], i, op, L); own = p.own[s]
            if tip is None:
                if op.kind == 'rc' and own: own = own._replace(st=4)
                elif op.kind == 'cl' and own and own.st < 4: own = None
            elif op.kind in ('rel', 'gb'): own = None
            elif op.kind == 'rc' or (op.kind == 'cl' and 'stage_early' not in M): own = OWN(op.e, tip.ranges[-1].first - 1, FS(), 0)
            q = p._replace(ops=rep(p.ops, s, None), own=rep(p.own, s, own) if p.alive else p.own)
            if tip is None: yield ('p%d %s of shard %d refused', i, op.kind, s), ((me, q),)
            else: yield ('p%d %s of shard %d lands', i, op.kind, s), ((s, tip), (me, q))
        if p.seal:                                                      # a seal lands on the manifest of the topic, or is refused
            s, e, k, mem = p.seal; top = w.tops[s]; ok = top.epoch == e and k >= top.applied
            yield ('p%d seal of shard %d %s', i, s, 'lands' if ok else 'refused'), ((me, p._replace(seal=None)),) + (((iW, w._replace(tops=rep(w.tops, s, TOP(e, k, mem)))),) if ok else ())
        if not p.alive: continue
        if R['ends'] and i == 0 and (R['ends'] != 'still' or not (put or p.seal or any(p.ops))): yield ('p%d ends', i), ((me, lost(i, p, log)),)
        b = p.bud
        def to(lab, ch=(), **k): return lab, ch + ((me, p._replace(**k)),)
        if put:                                                         # the owner learns
            mine = ('D', put.secs, put.heads); there = d.get(n)
            if there and there[0] in ('F', 'G', 'XF', 'XG'):
                if 'ignore_412' in M: yield to(('p%d takes no notice of the fence at %d', i, n), nxt=n + 1)
                else: yield ('p%d meets %s at %d', i, there[0], n), ((me, lost(i, p, log)),)
            elif there or put.made:
                if there and there[1:] != mine[1:] and 'reuse_id' not in M: raise Violation('foreign DATA in log %d' % i)
                fence = (n + 1 in d and d[n + 1][0] in ('F', 'G', 'XF', 'XG'))
                if put.sup and not fence: raise Violation('p%d has lost its log and no fence stands behind slot %d' % (i, n))
                if put.sent == 2 and put.sup and 'no_probe' not in M and (('no_look' in M and put.made == 2) or ('head_last' in M and there)):
                    raise Violation('p%d confirmed at slot %d by a try that was sent after it had lost the shard' % (i, n))
                if not there and put.sent == 2 and fence and 'no_look' not in M: yield ('p%d retried create, fence at %d', i, n + 1), ((me, lost(i, p, log)),)
                else:
                    own = p.own
                    for s, e, k in put.secs:
                        if own[s] and own[s].e == e: own = rep(own, s, own[s]._replace(k=max(k, own[s].k), mem=own[s].mem | {(i, n, s, e, k)}))
                    yield to(('p%d slot %d certain: acked', i, n), ((iA, acked | {(i, n) + x for x in put.secs}),), nxt=n + 1, pend=None, hd=put.heads, own=own,
                             late=(n, mine) if put.fly else p.late)
            if put.sent == 1 and b.dup:
                yield to(('p%d sends slot %d again', i, n), pend=put._replace(fly=put.fly + 1, sent=2, sup=any(o and SM[s].epoch != o.e for s, o in enumerate(p.own))), bud=b._replace(dup=b.dup - 1))
        if b.adds and log and (not put or ('two_puts' in M and not p.late and put.fly == 1 and not put.made)):         # stage and freeze
            ok = [s for s in range(NS) if p.own[s] and (p.own[s].st == 1 or ('stage_stopped' in M and p.own[s].st == 2))]
            hd = put.heads if put else p.hd
            for ss in [(s,) for s in ok] + ([tuple(ok)] if R['both'] and len(ok) > 1 else []):
                secs = tuple((s, p.own[s].e, p.own[s].k + 1 + has(put, s)) for s in ss); heads = hd
                for s, e, k in secs: heads = rep(heads, s, (e, k))
                late = (n, ('D', put.secs, put.heads)) if put else p.late
                yield to(('p%d freezes slot %d: %s', i, n + bool(put), secs), pend=PUT(secs, heads, 1, 1, 0, False), nxt=n + bool(put), late=late, bud=b._replace(adds=b.adds - 1))
                if 'k_staged' in M and not put: yield to(('p%d throws out a numbered section of shard %d', i, ss[0]), own=rep(p.own, ss[0], p.own[ss[0]]._replace(k=p.own[ss[0]].k + 1)), bud=b._replace(adds=b.adds - 1))
        if 'reuse_id' in M and put and not p.late and put.fly:            # crash, and on with the same log
            own = tuple(OWN(t.epoch, 0, FS(), 0) if opened(t) and opened(t).log == i else None for t in SM)
            if log[-1][1][0] != 'F': yield to(('p%d restarts with its old log',  i), pend=None, late=(n, ('D', put.secs, put.heads)), nxt=log[-1][0] + 1, hd=log[-1][1][2], own=own, ops=(None,) * NS)
        for s in range(NS):
            o, tip = p.own[s], SM[s]; r = opened(tip)
            if o and o.st == 0 and tip.epoch == o.e:                    # replay; a hole raises
                mine = tuple(x for x in log if x[0] < n) if any(x[0][-1] == 'G' for m, x in log) else log           # what the operator wrote is behind what it knows
                if not mine: continue
                try: mem, k = recover(s, tip, rep(tuple(L), i, mine), tip.ck, w)
                except Named: continue
                if w.tops[s].epoch > o.e or (k < w.tops[s].applied and 'seal_above' not in M): continue      # the topic is refused: slots are lost that it was sealed as of
                if (r is None or k != r.first - 1) and 'reuse_id' not in M: raise Violation('shard %d: replay ends at k %d, first_slot is %s' % (s, k, r and r.first))
                yield to(('p%d replays shard %d to k %d', i, s, k), ((iW, w._replace(tops=rep(w.tops, s, w.tops[s]._replace(epoch=o.e)))),) if R['hit'] else (), own=rep(p.own, s, OWN(o.e, k, mem, 1)))
            if p.ops[s]: continue
            if R['back'] and o and o.st < 2 and b.rels and (('gb_written' in M and o.st) or not (has(put, s) or (p.hd[s] and p.hd[s][0] == o.e))) and ('gb_named' in M or tip.epoch != o.e or i not in [x.log for x in tip.ranges[:-1]]):
                yield to(('p%d freezes giving back shard %d', i, s), ops=rep(p.ops, s, OP('gb', o.e, n - 1, o.k, None, None)), own=rep(p.own, s, o._replace(st=3)), bud=b._replace(rels=b.rels - 1))
            if o and o.st == 1:
                if b.seals and not p.seal and w.tops[s].applied < o.k: yield to(('p%d freezes a seal of shard %d as of k %d', i, s, o.k), seal=(s, o.e, o.k, o.mem), bud=b._replace(seals=b.seals - 1))
                if b.cks: yield to(('p%d freezes a checkpoint of shard %d at k %d', i, s, o.k), ops=rep(p.ops, s, OP('ck', o.e, n - 1, o.k, o.mem, None)), bud=b._replace(cks=b.cks - 1))
                if b.rels and (not has(put, s) or 'early_release' in M):
                    yield to(('p%d freezes a release of shard %d at k %d', i, s, o.k), ops=rep(p.ops, s, OP('rel', o.e, n - 1, o.k, o.mem, None)), own=rep(p.own, s, o._replace(st=2)), bud=b._replace(rels=b.rels - 1))
                if b.recl and (not put or 'rc_uncertain' in M):
                    yield to(('p%d freezes a reclaim of shard %d at slot %d', i, s, n - 1), ops=rep(p.ops, s, OP('rc', o.e + 1, n - 1, o.k, None, bool(p.hd[s] and p.hd[s][0] == o.e))), own=rep(p.own, s, o._replace(st=2)), bud=b._replace(recl=b.recl - 1))
            if (o is None or o.st == 4) and b.claims and (log or 'open_late' in M):
                f = p.cand[:3] if p.cand and p.cand[3] else None
                if r is None or (f and (r.log == f[0] or 'epoch_only' in M)):
                    op = OP('cl', tip.epoch + 1, n if 'from_next' in M else n - 1, 0, None, f if r else None); own = p.own
                    if 'stage_early' in M:
                        t2 = claimed(s, tip, i, op, L)
                        if t2: own = rep(own, s, OWN(op.e, t2.ranges[-1].first - 1, FS(), 1))
                    yield to(('p%d freezes a claim of shard %d from %d', i, s, n - 1), ops=rep(p.ops, s, op), own=own, bud=b._replace(claims=b.claims - 1))
        if not log and 'open_late' in M: yield ('p%d opens its log', i), ((iL + i, ((1, ('O', (), (None,) * NS)),)),)
        if p.bound is None:                                             # L7
            if b.plans:
                x = bound_of(i, p, SM, L)
                if any(m <= x and v[0][-1] != 'F' for m, v in log): yield to(('p%d plans to delete up to %d', i, x), bound=x, bud=b._replace(plans=b.plans - 1))
        else:
            ms = [m for m, v in log if m <= p.bound and v[0][-1] != 'F']
            if ms: yield to(('p%d deletes slot %d', i, ms[0]), ((iL + i, tuple(x for x in log if x[0] != ms[0])),), bound=p.bound if len(ms) > 1 else None)
        c = p.cand
        if b.tries and (c is None or c[3]):                             # L4
            for l in range(ND):
                if l == i or (not R['unnamed'] and not any(opened(t) and opened(t).log == l for t in SM)): continue
                if not L[l]:
                    if 'open_late' in M and any(opened(t) and opened(t).log == l for t in SM): raise Violation('log %d is named and has no slot' % l)
                    if 'open_late' in M: continue
                    raise Violation('log %d has vanished' % l)
                if unended(l, L, w): continue                           # damage, which is named
                m, (kind, secs, heads) = L[l][-1]
                if kind == 'F': cand = (l, m, heads, True)
                else: cand = (l, m + 1, heads, True) if 'claim_first' in M else (l, m, heads, False)
                if cand != c: yield to(('p%d lists log %d: %s at %d', i, l, kind, m), cand=cand, bud=b._replace(tries=b.tries - 1))
        if c and not c[3]:
            l, m, heads, _ = c; x = dict(L[l]).get(m + 1)
            if x is None:
                yield to(('p%d fences log %d at %d', i, l, m + 1), ((iL + l, insert(L[l], m + 1, ('F', (), heads))),), cand=(l, m + 1, heads, True))
            elif x[0][0] == 'X': yield to(('p%d finds %s at %d of log %d', i, x[0], m + 1, l), cand=None)
            else: yield to(('p%d finds %s at %d of log %d', i, x[0], m + 1, l), cand=(l, m + 1, heads if 'stale_heads' in M else x[2], x[0] == 'F'))
    if R['gc']:                                                         # L12
        st, left = gc
        dead = lambda l: 'gc_unfenced' in M or L[l][-1:] and (L[l][-1][1][0] == 'F' or ('gc_any_fence' in M and any(x[0] == 'F' for n, x in L[l])))
        if st is None:
            for l in range(ND):
                if left and L[l] and (dead(l) or 'gc_early' in M): yield ('collector looks at log %d', l), ((iG, ((l, 0), left - 1)),)
        else:
            l, s = st
            if s < NS:
                named = opened(SM[s]) and opened(SM[s]).log == l if 'gc_open' in M else froms(SM[s], l)
                yield ('collector reads the tip of shard %d', s), ((iG, (None if named else (l, s + 1), left)),)
            elif dead(l):
                f = max([n for n, x in L[l] if x[0] == 'F'], default=0)
                rest = tuple(x for x in L[l] if not (x[1][0] in DATA or 'gc_fence' in M) or ('gc_below' in M and x[0] > f))
                yield ('collector empties log %d', l), ((iL + l, rest), (iG, (None, left)))

def check_shard(s, tip, L, acked, w):
    mine = [x for x in acked if x[2] == s]; r = opened(tip)
    if R['once'] and len({x[4] for x in mine}) < len(mine): return 'shard %d: a shard slot is used twice: %s' % (s, sorted(x[4] for x in mine))
    if r and L[r.log] and unended(r.log, L, w): return                  # nobody takes over, until the operator has given up
    for name, start in (('checkpoint', tip.ck), ('previous', tip.prev)):
        try: got, last = recover(s, tip, L, start, w)
        except Named as e:
            if not any(x[:2] in w.gone for x in mine) and not any(x[0][0] == 'X' and any(y[0] == s for y in x[1]) for log in L for n, x in log): return 'refused, and none of its sections is damaged: %s' % e
            if R['whole'] and name == 'checkpoint' and any(x[0] == y.log for x in w.done for y in tip.ranges): return 'refused after it was given up: %s' % e
            continue
        if R['whole'] and r and name == 'checkpoint' and last < w.tops[s].applied: return 'shard %d: its topic was sealed as of k %d, above the last, %d' % (s, w.tops[s].applied, last)
        for x in mine:
            if x not in got and x[:2] not in w.done: return 'lost: acked shard %d k %d (log %d slot %d, epoch %d), from %s' % (s, x[4], x[0], x[1], x[3], name)
def check_daemon(p, SM, log, acked, i, w):
    if not p.alive: return
    sup = [s for s, o in enumerate(p.own) if o and o.e != SM[s].epoch and not ('stage_early' in M and p.ops[s])]
    if sup and 'no_probe' not in M and (not p.pend or 'probe_uncertain' in M) and p.nxt not in dict(log): return 'a probe of p%d confirms shard %d, which it has lost' % (i, sup[0])
    if not M and p.bound is not None and any(f < p.bound for t in SM for f in froms(t, i)): return 'a bound that p%d planned is above a `from`' % i
    for s, o in enumerate(p.own):
        if o and o.st in (1, 2) and o.e == SM[s].epoch:
            for x in acked:
                if x[2] == s and x not in o.mem and x[:2] not in w.gone: return 'p%d serves shard %d without acked k %d' % (i, s, x[4])
def check_fences(SM, L):
    for l in range(ND):
        fs = [n for n, x in L[l] if x[0] == 'F']
        if not M and not R['hit'] and fs and any(opened(t) and opened(t).log == l and min(froms(t, l)) < fs[-1] < L[l][-1][0] for t in SM): return 'a fence of log %d can be claimed with and is not its end' % l
        if len(fs) > 1 and not R['hit'] and any(opened(t) and opened(t).log == l and sum(f > min(froms(t, l)) for f in fs) > 1 for t in SM): return 'two fences of log %d can be claimed with' % l

def init():
    none = (None,) * NS
    S = [TIP(1, (RNG(0, 1, 1, None, 1, None),), (0, FS()), (0, FS())) for s in range(NS)]
    S += [() if 'open_late' in M and i == 1 else ((1, ('O', (), none)),) for i in range(ND)] + [FS()]
    for i in range(ND):
        S.append(D(True, 2, None, None, none, (OWN(1, 0, FS(), 1),) * NS if i == 0 else none, none, None, None, B(*R['p'][i])))
    return S + [W(R['hits'], R['gives'], FS(), FS(), (0,) * ND, None, tuple(TOP(1, 0, FS()) for s in range(NS))), (None, R['gc'])]

def run(name, mut=FS(), cap=12_000_000, secs=900):
    global M, R, NS, ND
    M, R = FS(mut), RUNS[name]; NS, ND = R['shards'], len(R['p']); t0 = time.time()
    ids, objs = {}, []
    def intern(o):
        x = ids.get(o)
        if x is None: x = ids[o] = len(objs); objs.append(o)
        return x
    s0 = init(); pk = struct.Struct('%dI' % len(s0)); k0 = pk.pack(*map(intern, s0))
    par = {k0: None}; q = deque([k0]); bad = None; seen = {}; tick = 0
    iL, iA, iP = NS, NS + ND, NS + ND + 1
    def cached(key, f, *a):
        if key in seen: return seen[key]
        try: x = f(*a)
        except Violation as v: x = str(v)
        seen[key] = x
        return x
    def check(t):
        S = [objs[x] for x in t]; L = S[iL:iA]; SM = S[:NS]; tl = t[iL:iA]
        for s in range(NS):
            x = cached((s, t[s]) + tl + t[iA:iP] + t[-2:-1], check_shard, s, S[s], L, S[iA], S[-2])
            if x: return x
        for i in range(ND):
            x = cached((-1 - i,) + t[:NS] + (tl[i], t[iA], t[iP + i], t[-2]), check_daemon, S[iP + i], SM, L[i], S[iA], i, S[-2])
            if x: return x
        return cached((-9,) + t[:NS] + tl, check_fences, SM, L)
    while q and not bad and len(par) < cap:
        k = q.popleft(); t = pk.unpack(k); tick += 1
        if tick % 5000 == 0:
            if time.time() - t0 > secs: q.append(k); break
            if len(seen) > 3_000_000: seen.clear()
        try:
            for lab, ch in succs([objs[x] for x in t]):
                t2 = list(t)
                for pos, o in ch: t2[pos] = intern(o)
                k2 = pk.pack(*t2)
                if k2 in par: continue
                par[k2] = k; e = check(tuple(t2))
                if e: bad = (k2, e); break
                q.append(k2)
        except Violation as v: bad = (k, str(v))
    print('%-10s %-18s %9d states %6.1fs %s' % (name, ' '.join(sorted(M)) or 'correct', len(par), time.time() - t0, 'VIOLATION' if bad else 'ok, exhausted' if not q else 'capped'), flush=True)
    if bad:
        tr, k = [], bad[0]
        while par[k]:
            u = par[k]; t = pk.unpack(u)
            for lab, ch in succs([objs[x] for x in t]):
                t2 = list(t)
                for pos, o in ch: t2[pos] = intern(o)
                if pk.pack(*t2) == k: break
            tr.append(lab[0] % lab[1:]); k = u
        print('    %s: %s' % (bad[1], ' | '.join(reversed(tr))), flush=True)
    return bad

def walk(name, mut=FS(), secs=60, seed=1):
    """random walks with budgets far too large to exhaust: no proof, a search for what small budgets hide"""
    global M, R, NS, ND
    M, R = FS(mut), RUNS[name]; NS, ND = R['shards'], len(R['p']); rnd = random.Random(seed); t0 = time.time(); steps = walks = 0
    while time.time() - t0 < secs:
        S = init(); tr = []; walks += 1; bias = [rnd.random() ** 2 for i in range(ND)]       # some daemons are slow, or dead
        while True:
            try:
                nx = list(succs(S))
                if not nx or len(tr) > 300: break
                w = [bias[lab[1]] if lab[0][0] == 'p' and lab[1] < ND else 0.3 for lab, ch in nx]
                lab, ch = rnd.choices(nx, w)[0]; tr.append(lab); steps += 1; S = list(S)
                for pos, o in ch: S[pos] = o
                SM, L, A = S[:NS], S[NS:NS + ND], S[NS + ND]
                e = check_fences(SM, L)
                for s in range(NS): e = e or check_shard(s, SM[s], L, A, S[-2])
                for i in range(ND): e = e or check_daemon(S[NS + ND + 1 + i], SM, L[i], A, i, S[-2])
                if e: raise Violation(e)
            except Violation as v:
                print('%-10s %-18s walk %d, step %d, %.1fs VIOLATION\n    %s: %s' % (name, ' '.join(M), walks, steps, time.time() - t0, v, ' | '.join(x[0] % x[1:] for x in tr)), flush=True); return
    print('%-10s %-18s %d walks, %d steps, %.0fs ok' % (name, ' '.join(M) or 'correct', walks, steps, time.time() - t0), flush=True)

def R_(shards, *p, both=False, gc=0, unnamed=False, back=False, hit=(), hits=1, gives=1, mid=False, atomic=False, once=False, whole=False, ends=False):
    return dict(shards=shards, p=p, both=both, gc=gc, unnamed=unnamed, back=back, hit=hit, hits=hits if hit else 0, gives=gives if hit else 0, mid=mid, atomic=atomic, once=once, whole=whole, ends=ends)
# budgets of a daemon: adds tries claims checkpoints releases reclaims plans duplicates seals
RUNS = {
    'tiny':    R_(1, (2, 0, 0, 1, 0, 0, 1, 0), (1, 1, 1, 1, 0, 0, 0, 0)),
    'fence':   R_(1, (4, 0, 0, 2, 0, 0, 1, 0), (1, 2, 1, 1, 0, 0, 0, 0), (0, 1, 1, 0, 0, 0, 0, 0)),                # old lists, emptied numbers, two candidates
    'copies':  R_(1, (2, 0, 0, 1, 0, 1, 1, 1), (1, 1, 1, 2, 0, 0, 0, 0), gc=1),                                     # hedges, retries, collected logs
    'main':    R_(2, (2, 0, 0, 2, 0, 0, 1, 0), (1, 1, 2, 0, 0, 0, 0, 0), (0, 1, 1, 0, 0, 0, 0, 0)),                # takeover and truncation
    'both':    R_(2, (2, 0, 0, 2, 0, 0, 1, 0), (1, 1, 2, 1, 0, 0, 0, 0), both=True),                              # slots with sections of both shards
    'both3':   R_(2, (3, 0, 0, 2, 0, 0, 1, 0), (1, 1, 2, 0, 0, 0, 0, 0), both=True),
    'main3':   R_(2, (3, 0, 0, 2, 0, 0, 1, 0), (1, 1, 2, 0, 0, 0, 0, 0), (0, 1, 1, 0, 0, 0, 0, 0)),
    'chain':   R_(1, (2, 0, 0, 1, 0, 0, 0, 0), (1, 1, 1, 1, 0, 0, 0, 0), (1, 2, 2, 2, 0, 0, 1, 0), gc=1),
    'chain4':  R_(1, (1, 0, 0, 0, 0, 0, 0, 0), (1, 1, 1, 0, 0, 0, 0, 0), (1, 1, 1, 1, 0, 0, 0, 0), (0, 1, 1, 0, 0, 0, 0, 0)), # the fourth: the first one's second life
    'release': R_(2, (2, 0, 1, 0, 2, 1, 1, 0), (1, 1, 1, 1, 0, 0, 0, 0)),                                          # release, reclaim, takeover between
    'zombie':  R_(1, (1, 0, 1, 1, 1, 1, 0, 0), (1, 1, 1, 1, 1, 1, 0, 0), (0, 1, 1, 0, 0, 0, 0, 0)),                # everything of a lost owner lands late
    'under3':  R_(2, (3, 0, 1, 2, 1, 0, 1, 0), (0, 1, 1, 0, 0, 0, 0, 0)),
    'under':   R_(2, (2, 0, 1, 2, 1, 0, 1, 0), (0, 1, 1, 0, 0, 0, 0, 0)),                                          # a claim under way while its log is truncated
    'again':   R_(1, (1, 0, 1, 0, 2, 0, 0, 0), (1, 0, 2, 0, 1, 0, 0, 0), (1, 1, 1, 0, 0, 0, 0, 0)),                # A, B, A
    'late':    R_(2, (0, 0, 0, 0, 2, 0, 0, 0), (1, 0, 2, 0, 1, 0, 0, 0), (0, 1, 2, 1, 0, 0, 0, 0), gc=1, unnamed=True), # claims of dead and collected logs
    'false':   R_(1, (3, 0, 1, 2, 1, 0, 1, 0), (0, 1, 0, 0, 0, 0, 0, 0), gc=1),                                      # a false fence in a log that lives on, and the collector
    'wide':    R_(2, (6, 1, 3, 5, 2, 2, 4, 2), (4, 3, 4, 4, 2, 1, 2, 1), (3, 3, 4, 3, 1, 1, 2, 1), (2, 2, 3, 2, 1, 1, 1, 0), both=True, gc=4, unnamed=True),  # for walks only
    'wide1':   R_(1, (6, 1, 3, 5, 2, 2, 4, 2), (4, 3, 4, 4, 2, 1, 2, 1), (3, 3, 4, 3, 1, 1, 2, 1), both=True, gc=4, unnamed=True),
    'back':    R_(1, (2, 0, 0, 0, 0, 0, 1, 0), (1, 1, 2, 0, 1, 0, 1, 0), (1, 1, 1, 1, 0, 0, 0, 0), gc=1, back=True),    # a claimant gives back what it won
    'back2':   R_(2, (2, 0, 0, 0, 0, 0, 0, 0), (1, 1, 2, 0, 1, 0, 0, 0), (0, 1, 1, 0, 0, 0, 0, 0), back=True),
    'backrc':  R_(1, (2, 0, 1, 0, 1, 1, 1, 0), (0, 1, 1, 0, 0, 0, 0, 0), back=True),                                # reclaim, then giving back
    'backck':  R_(1, (2, 0, 1, 2, 1, 1, 1, 0), (1, 1, 2, 0, 1, 0, 0, 0), gc=1, back=True),                          # claims drop ranges, shards are given back
    'backck2': R_(1, (1, 0, 0, 2, 0, 0, 1, 0), (1, 1, 2, 0, 1, 0, 1, 0), (1, 1, 1, 1, 0, 0, 0, 0), gc=1, back=True),
    # damage at the end of a log, and what the operator gives up
    'end':     R_(1, (2, 0, 0, 0, 0, 0, 0, 0, 1), (1, 1, 1, 0, 0, 0, 0, 0), (0, 1, 1, 0, 0, 0, 0, 0), hit=('damage',), once=True, whole=True),       # the newest slot; two candidates
    'end1':    R_(1, (1, 0, 0, 1, 0, 0, 0, 1, 1), (1, 1, 1, 0, 0, 0, 0, 0), hit=('damage',), gc=1, once=True, whole=True),                          # copies that land late, the collector
    'end2':    R_(1, (2, 0, 0, 1, 0, 0, 0, 0, 1), (1, 1, 1, 0, 0, 0, 0, 0), hit=('damage',), hits=2, gives=2),                                      # a fence between what is written
    'end2s':   R_(1, (2, 0, 0, 0, 0, 0, 0, 0, 1), (1, 1, 1, 0, 0, 0, 0, 0), hit=('damage',), hits=2, gives=2),
    'end2a':   R_(1, (2, 0, 0, 0, 0, 0, 0, 0, 1), (1, 1, 1, 0, 0, 0, 0, 0), hit=('damage',), hits=2, atomic=True, once=True),                       # all at once
    'ends':    R_(2, (2, 0, 0, 1, 0, 0, 0, 0, 0), (1, 1, 2, 0, 0, 0, 0, 0), both=True, hit=('damage',), once=True, whole=True),                     # slots of two shards
    'mid':     R_(2, (2, 0, 0, 1, 0, 0, 0, 0, 0), (0, 1, 2, 0, 0, 0, 0, 0), both=True, hit=('damage',), mid=True, once=True),                       # in the middle
    'endt':    R_(1, (3, 0, 0, 2, 0, 0, 1, 0, 0), (1, 2, 1, 0, 0, 0, 0, 0), hit=('damage',), atomic=True, once=True),                                            # a false fence below it
    'endrc':   R_(1, (2, 0, 0, 0, 0, 1, 0, 0, 0), (1, 1, 1, 0, 0, 0, 0, 0), hit=('damage',), once=True),                                            # claimed anew in the damaged log
    'endb':    R_(1, (1, 0, 0, 0, 0, 0, 0, 0, 1), (1, 1, 1, 0, 1, 0, 0, 0), (0, 1, 1, 0, 0, 0, 0, 0), back=True, hit=('damage',), hits=2, gives=2), # given back afterwards, damaged again
    'lost':    R_(1, (2, 0, 0, 1, 0, 0, 0, 0, 1), (1, 1, 1, 0, 0, 0, 0, 0), hit=('told',), gives=2, ends=True),
    'still':   R_(1, (2, 0, 0, 1, 0, 0, 0, 0, 1), (1, 1, 1, 0, 0, 0, 0, 0), hit=('late',), atomic=True, whole=True, ends='still'),                  # nothing of the dead daemon is under way
    'untold':  R_(1, (2, 0, 0, 1, 0, 0, 0, 0, 1), (1, 1, 1, 0, 0, 0, 0, 0), hit=('late', 'untold'), gives=2, ends=True),
    'idle':    R_(2, (3, 0, 0, 4, 0, 0, 1, 0), (0, 1, 1, 0, 0, 0, 0, 0)),
}
# planted bugs, each with a run that shows it ('again:heads_no_epoch,ck_below' on the command line)
MUTANTS = {
    'other_epoch':      ('tiny', 'a shard whose tip is of another epoch no longer holds the bound'),
    'claim_first':     ('fence', 'claim before the fence'),
    'epoch_only':      ('chain', 'claim by "epoch lower" with any fence in hand'),
    'no_from':         ('fence', 'L5 without `from` < f'),
    'first_slot':      ('chain', 'first_slot = checkpoint.slot + 1 after an empty range was dropped'),
    'from_next':       ('tiny', 'claim with `from` = own next number'),
    'no_heads':        ('late', 'no heads in the fence'),
    'heads_no_epoch,ck_below':('again', 'heads taken whatever their epoch'),
    'stale_heads':     ('main', 'FENCE with the heads of the listed slot, not of the one before it'),
    'bound_claims':    ('under', 'bound ignores own claims under way'),
    'bound_prev':      ('fence', 'bound by checkpoint instead of previous'),
    'bound_owned':     ('release', 'bound counts only owned shards (harmless by itself: who does not own it any more has released it for certain)'),
    'bound_open':      ('release', 'bound counts only open ranges'),
    'bound_high':      ('tiny', 'the highest slot is deleted'),
    'fast_release,bound_owned': ('release', 'release keeps its ranges, bound counts only owned shards'),
    'gc_fence':        ('late', 'FENCE deleted with the dead log'),
    'gc_early':        ('late', 'collector reads tips before it saw the fence'),
    'gc_unfenced':     ('late', 'collector empties an unfenced log that nothing names'),
    'gc_any_fence':    ('false', 'collector takes a log for dead because of a fence that is not its highest slot'),
    'gc_open':         ('chain', 'collector looks at open ranges only'),
    'two_puts':        ('tiny', 'two slots under way'),
    'early_release':   ('release', 'release before the last section is certain'),
    'release_once':    ('release', 'release writes its checkpoint once'),
    'stage_early':     ('release', 'staging before the claim is certain'),
    'stage_stopped':   ('release', 'staging after the release was begun'),
    'rc_uncertain':    ('release', 'reclaim while a slot is uncertain'),
    'k_staged':        ('tiny', 'k given at staging'),
    'claim_drop_ck':   ('fence', 'a claim drops ranges at checkpoint.slot'),
    'drop_ck':         ('fence', 'ranges dropped at checkpoint.slot'),
    'raise_ck':        ('idle', '`from` raised by checkpoint.slot'),
    'idle_ck':         ('idle', '`from` of an idle shard raised by checkpoint.slot alone'),
    'raise_staged':    ('idle', '`from` raised past a slot that is not certain'),
    'ck_any_epoch':    ('copies', 'a checkpoint that lands after the claim is taken'),
    'reuse_id':        ('copies', 'log id used again after a restart'),
    'open_late':       ('late', 'OPEN after the first claim'),
    'ignore_412':      ('fence', 'owner goes on behind the fence'),
    'no_look':         ('copies', 'retried create confirms without the look at n + 1'),
    'head_last':       ('copies', 'a slot found by HEAD counts from its last sending'),
    'probe_uncertain': ('copies', 'a probe counts while a slot is uncertain'),
    'gb_written':      ('back', 'a shard is given back although a section of it was written'),
    'gb_first':        ('back', 'a shard that was given back is claimed with last k = checkpoint.slot'),
    'gb_named':        ('backrc', 'a shard is given back although a closed range names the own log'),
    'page_fence':       ('end', 'what is given up is a FENCE with the heads of the newest slot that can be read'),
    'page_fence,seal_above': ('end2s', 'the same, and a topic that was sealed above the last shard slot is served: rows are lost'),
    'seal_above':       ('end2s', 'a topic that was sealed above the last shard slot is served: a fence came between what is written'),
    'ck_below':         ('untold', 'a claim goes on below the checkpoint'),
    'give_one':         ('end2a', 'one section in place of all slots that are given up'),
    'no_known':         ('still', 'sections up to what checkpoint and topics know of are not counted'),
    'end_below':        ('endt', 'a FENCE below a damaged slot is taken for the end'),
    'fence_counts':     ('endt', 'slots are counted from a false fence, whose heads are of the slot before it'),
    'any_epoch':       ('again', 'sections taken whatever their epoch (harmless: L6 and `from` keep others out)'),
}
if __name__ == '__main__':
    what = sys.argv[1:] or ['correct', 'mutants']
    for w in what:
        if w == 'correct':
            for n in RUNS: walk(n, secs=120) if n[:4] == 'wide' else run(n)
        elif w == 'mutants':
            for m, (n, text) in MUTANTS.items(): print('# ' + text); run(n, FS(m.split(',')))
        else: n, _, m = w.partition(':'); (walk if n[:4] == 'wide' else run)(n, FS(x for x in m.split(',') if x))
