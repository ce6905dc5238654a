#!lua name=headrace

-- Every move of a request through Redis, each one atomic. The keyspace is described in keys.py.
--
-- live hash:  request    packed GenerationRequest (dropped at the end, it may be large)
--             header     packed QueueEntry, what the dispatcher needs to place it
--             queue      the queue stream it belongs to      entry   its id there, while queued
--             attempt    raised by every assignment and by every seizure: the fence
--             failures   replicas that died with it
--             replica    who has it, '' while queued         followers   feed owners, by space
--             ended      '1' after its last delta
--             cancelled  once somebody cancelled it: the code with which it is to end
--             until      ms of Redis's clock: nobody follows it, and until then it may be followed
--                        again; after that it is cancelled
--             fence      'ATTEMPT FOLLOWERS' while nothing is amiss: all that a step must know,
--                        in one field; whatever is amiss takes it away
--             tag        its tenant's virtual time before its first assignment
--             charge     what its tenant was charged for it then

local function words(text)
  local list = {}
  for word in string.gmatch(text or '', '%S+') do list[#list + 1] = word end
  return list
end

-- Append frames to a log that has `before` bytes. Returns how many were new: 0 if they had been
-- said already, nil if the log has lost some; those before an ending may be lost.
local function append(live_key, log_key, before, frames, life_ms, is_last)
  local after = redis.call('APPEND', log_key, frames)
  if after == #frames then
    local left = redis.call('PTTL', live_key)
    redis.call('PEXPIRE', log_key, left > 0 and left or life_ms)
  end
  local found = after - #frames
  if found == before or (found < before and is_last) then return #frames end
  if found == 0 then
    redis.call('DEL', log_key)
  else
    redis.call('SET', log_key, redis.call('GETRANGE', log_key, 0, found - 1), 'KEEPTTL')
  end
  if found > before then return 0 end
end

-- What a step must do for a request without its fence: a word, and the fence if it may speak.
local function look_closer(live_key, attempt)
  local live = redis.call('HMGET', live_key, 'attempt', 'ended', 'followers', 'cancelled')
  if not live[1] then return 'gone' end
  if live[2] then return 'ended' end
  if live[1] ~= attempt then return 'moved' end
  return live[4] and 'cancelled' or 'ok', attempt .. ' ' .. live[3]
end

-- Let a step take the short way, or, with no attempt, the long one.
local function set_fence(live_key, attempt, followers)
  if attempt then
    redis.call('HSET', live_key, 'fence', attempt .. ' ' .. followers)
  else
    redis.call('HDEL', live_key, 'fence')
  end
end

local function finish(keys, live_key, log_key, usage, life_ms)
  local charge = redis.call('HGET', live_key, 'charge')
  redis.call('HSET', live_key, 'ended', '1')
  redis.call('HDEL', live_key, 'request', 'header', 'fence', 'charge')
  redis.call('PEXPIRE', live_key, life_ms)
  redis.call('PEXPIRE', log_key, life_ms)
  local id = string.match(live_key, ':live:(.*)$')
  redis.call('SREM', keys[1], id)
  if charge then
    redis.call('XADD', keys[2], '*', 'id', id, 'charge', charge, 'usage', usage)
  end
end

-- Accept a request: both the live key and the place in the queue, or neither.
-- Without a replica that has lately served these weights it would only wait for its deadline.
-- keys: live, log, queue, open, serving
-- args: request id, header, request, follower, most queued, time to live in ms
local function enqueue(keys, args)
  if redis.call('EXISTS', keys[1]) == 1 then return 'exists' end
  if redis.call('EXISTS', keys[5]) == 0 then return 'unserved' end
  if redis.call('XLEN', keys[3]) >= tonumber(args[5]) then return 'full' end
  local entry = redis.call('XADD', keys[3], '*', 'id', args[1], 'header', args[2])
  redis.call('HSET', keys[1], 'request', args[3], 'header', args[2], 'queue', keys[3],
    'entry', entry, 'attempt', 0, 'failures', 0, 'replica', '', 'followers', args[4])
  redis.call('PEXPIRE', keys[1], args[6])
  redis.call('DEL', keys[2])
  redis.call('SADD', keys[4], args[1])
  return 'queued'
end

-- Give a queued request to a replica: raise the attempt, fill the inbox, leave the queue. The
-- first time its tenant is charged for it.
-- keys: leader, live, inbox, clock
-- args: fencing token, request id, replica id, weights digest, most in an inbox,
--       tenant, its virtual time before and after the charge, the charge
local function assign(keys, args)
  if redis.call('GET', keys[1]) ~= args[1] then return {'not_leader'} end
  local live = redis.call('HMGET', keys[2],
    'attempt', 'replica', 'ended', 'cancelled', 'queue', 'entry', 'request', 'followers', 'tag')
  if not live[1] then return {'gone'} end
  if live[3] or live[4] then return {'ended'} end
  if live[2] ~= '' then return {'taken'} end
  if redis.call('XLEN', keys[3]) >= tonumber(args[5]) then return {'full'} end
  local attempt = tonumber(live[1]) + 1
  redis.call('HSET', keys[2], 'attempt', attempt, 'replica', args[3], 'entry', '')
  set_fence(keys[2], attempt, live[8])
  if not live[9] then
    redis.call('HSET', keys[2], 'tag', args[7], 'charge', args[9])
    redis.call('HSET', keys[4], args[6], args[8])
  end
  redis.call('XDEL', live[5], live[6])
  local order = redis.call('XADD', keys[3], '*', 'v', '1', 'kind', 'assignment', 'id', args[2],
    'attempt', attempt, 'weights', args[4], 'request', live[7], 'queued', live[6])
  return {'assigned', attempt, order}
end

-- Put an assigned request back into its queue. A crash counts as a failure, a hand-back does
-- not. With a token only the leader may do it; without one, the replica that has it.
-- keys: leader, live              args: fencing token or '', request id, replica id, failures to add
local function requeue(keys, args)
  if args[1] ~= '' and redis.call('GET', keys[1]) ~= args[1] then return 'not_leader' end
  local live = redis.call('HMGET', keys[2],
    'replica', 'ended', 'queue', 'header', 'cancelled', 'tag')
  if not live[1] then return 'gone' end
  if live[2] then return 'ended' end
  if live[1] ~= args[3] then return 'moved' end
  if live[5] then return 'cancelled' end
  set_fence(keys[2])
  local entry = redis.call('XADD', live[3], '*', 'id', args[2], 'header', live[4],
    'tag', live[6] or '')
  redis.call('HINCRBY', keys[2], 'attempt', 1)
  redis.call('HINCRBY', keys[2], 'failures', args[4])
  redis.call('HSET', keys[2], 'replica', '', 'entry', entry)
  return 'queued'
end

-- Add one entry to each follower's feed. `feeds` has lists of frames by fence, which names them.
local function send(feeds, prefix, most, life_ms)
  local entries = {}
  for fence, feed in pairs(feeds) do
    local frames = table.concat(feed)
    for follower in string.gmatch(fence, ' (%S+)') do
      entries[follower] = (entries[follower] or '') .. frames
    end
  end
  for follower, frames in pairs(entries) do
    local key = prefix .. follower
    redis.call('XADD', key, 'MAXLEN', '~', most, '*', 'd', frames)
    redis.call('PEXPIRE', key, life_ms)
  end
end

-- Publish one engine step: per request append to its log if the attempt still holds, then one
-- feed entry per follower. A last delta ends the request. Saying the same deltas twice (a reply
-- was lost) publishes them once: the log is as long as it was before. Deltas that follow some that
-- this server lost (it failed over) are refused as those of a lost request are; only the ending
-- may follow a gap.
-- keys: open, endings, then live and log of each request
-- args: prefix of feed keys, most entries in a feed, ms a log outlives the end,
--       then of each request: attempt, bytes that its log has before, framed deltas,
--       its usage if they end it, else ''
local function step(keys, args)
  local results, feeds = {}, {}
  for i = 1, #keys / 2 - 1 do
    local live_key, log_key = keys[2 * i + 1], keys[2 * i + 2]
    local attempt, before, frames, usage = unpack(args, 4 * i, 4 * i + 3)
    local fence = redis.call('HGET', live_key, 'fence')
    local result = 'ok'
    if not fence or string.sub(fence, 1, #attempt + 1) ~= attempt .. ' ' then
      result, fence = look_closer(live_key, attempt)
    end
    if fence then
      local said = append(live_key, log_key, tonumber(before), frames, args[3], usage ~= '')
      if not said then
        result = 'gone'
      elseif said > 0 then
        local feed = feeds[fence]
        if not feed then
          feed = {}
          feeds[fence] = feed
        end
        feed[#feed + 1] = frames
        if usage ~= '' then finish(keys, live_key, log_key, usage, args[3]) end
      end
    end
    results[i] = result
  end
  send(feeds, args[1], args[2], args[3])
  return results
end

-- End one request before the ledger knows: its settlement waits for maintenance.
-- keys: open, endings, live, log, unsettled
-- args: as for a step with this one request, and its settlement
local function end_unsettled(keys, args)
  local settlement, unsettled = table.remove(args), table.remove(keys)
  local result = step(keys, args)[1]
  if result == 'ok' or result == 'cancelled' then
    redis.call('XADD', unsettled, '*', 'settlement', settlement)
  end
  return result
end

-- Of an assigned request its replica is told; of a queued one the dispatcher is, through the queue
-- itself: either ends it.
local function stop(live_key, id, inbox_prefix, error)
  local live = redis.call('HMGET', live_key, 'replica', 'ended', 'queue', 'entry', 'cancelled')
  if not live[1] then return 'gone' end
  if live[2] then return 'ended' end
  if live[5] then return 'cancelled' end
  redis.call('HSET', live_key, 'cancelled', error)
  set_fence(live_key)
  if live[1] == '' then
    redis.call('XDEL', live[3], live[4])
    local entry = redis.call('XADD', live[3], '*', 'id', id, 'cancelled', error)
    redis.call('HSET', live_key, 'entry', entry)
    return 'queued'
  end
  redis.call('XADD', inbox_prefix .. live[1], '*', 'v', '1', 'kind', 'cancel', 'id', id,
    'error', error)
  return 'assigned'
end

-- Cancel a request.
-- keys: live                      args: request id, prefix of inbox keys, error code
local function cancel(keys, args)
  return stop(keys[1], args[1], args[2], args[3])
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function set_followers(live_key, attempt, followers)
  redis.call('HSET', live_key, 'followers', followers)
  if redis.call('HEXISTS', live_key, 'fence') == 1 then set_fence(live_key, attempt, followers) end
end

-- Take a follower away whose last reader has left. When it was the only one, the request is
-- cancelled, or kept for whoever comes within the grace; the leader cancels it after that.
-- keys: live
-- args: request id, prefix of inbox keys, error code, follower, grace in ms
local function leave(keys, args)
  local live = redis.call('HMGET', keys[1], 'attempt', 'ended', 'followers')
  if not live[1] then return 'gone' end
  if live[2] then return 'ended' end
  local others = {}
  for _, follower in ipairs(words(live[3])) do
    if follower ~= args[4] then others[#others + 1] = follower end
  end
  set_followers(keys[1], live[1], table.concat(others, ' '))
  if #others > 0 then return 'followed' end
  if args[5] == '0' then return stop(keys[1], args[1], args[2], args[3]) end
  redis.call('HSET', keys[1], 'until', now_ms() + args[5])
  return 'kept'
end

-- Cancel a request whose followers, as the caller saw them, are all dead, unless it has got others
-- since or is kept for some.
-- keys: live
-- args: request id, prefix of inbox keys, error code, followers
local function lapse(keys, args)
  local live = redis.call('HMGET', keys[1], 'followers', 'until')
  if live[1] and live[1] ~= args[4] then return 'followed' end
  if live[2] and now_ms() < tonumber(live[2]) then return 'kept' end
  return stop(keys[1], args[1], args[2], args[3])
end

-- Take a request from whoever has it, so that the caller alone may end it. The code with which
-- it is to end stays with it, in case this caller dies too.
-- keys: live                      args: error code
local function seize(keys, args)
  local live = redis.call('HMGET', keys[1], 'attempt', 'ended', 'queue', 'entry', 'request')
  if not live[1] then return {'gone'} end
  if live[2] then return {'ended'} end
  if live[4] ~= '' then redis.call('XDEL', live[3], live[4]) end
  redis.call('HSET', keys[1], 'replica', '', 'entry', '', 'cancelled', args[1])
  set_fence(keys[1])
  return {'seized', redis.call('HINCRBY', keys[1], 'attempt', 1), live[5]}
end

-- Send a request's deltas to one more follower, from the log's present end on.
-- keys: live, log                 args: follower
local function follow(keys, args)
  local live = redis.call('HMGET', keys[1], 'attempt', 'followers', 'ended')
  if not live[1] then return {'gone'} end
  for _, follower in ipairs(words(live[2])) do
    if follower == args[1] then return {'following', redis.call('STRLEN', keys[2])} end
  end
  set_followers(keys[1], live[1], live[2] == '' and args[1] or live[2] .. ' ' .. args[1])
  redis.call('HDEL', keys[1], 'until')
  return {'following', redis.call('STRLEN', keys[2])}
end

-- Note virtual times that settlements have changed, and forget the settlements, as one.
-- keys: leader, clock, endings
-- args: fencing token, number of tenants, each tenant and its virtual time, ids of endings
local function set_clock(keys, args)
  if redis.call('GET', keys[1]) ~= args[1] then return 'not_leader' end
  local last = 2 + 2 * args[2]
  for i = 3, last, 2 do redis.call('HSET', keys[2], args[i], args[i + 1]) end
  for i = last + 1, #args do redis.call('XDEL', keys[3], args[i]) end
  return 'set'
end

-- Keep, or take, the lead of a model's dispatching.
-- keys: leader                    args: own fencing token, lease in ms
local function lead(keys, args)
  local leader = redis.call('GET', keys[1])
  if leader and leader ~= args[1] then return 'standby' end
  redis.call('SET', keys[1], args[1], 'PX', args[2])
  return 'leading'
end

redis.register_function('headrace_enqueue', enqueue)
redis.register_function('headrace_assign', assign)
redis.register_function('headrace_requeue', requeue)
redis.register_function('headrace_step', step)
redis.register_function('headrace_end_unsettled', end_unsettled)
redis.register_function('headrace_cancel', cancel)
redis.register_function('headrace_leave', leave)
redis.register_function('headrace_lapse', lapse)
redis.register_function('headrace_seize', seize)
redis.register_function('headrace_follow', follow)
redis.register_function('headrace_lead', lead)
redis.register_function('headrace_set_clock', set_clock)
